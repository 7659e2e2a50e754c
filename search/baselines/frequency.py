"""Keep the experts that are chosen most often.

Source: Efficient Expert Pruning (https://arxiv.org/abs/2407.00945), App. A.2, baseline 2 (after SEER-MoE,
https://arxiv.org/abs/2404.05089): the number of times each expert is activated on the training set, per layer. A group
of layers keeps the experts of the highest mean share.
"""

from __future__ import annotations

from moevolve.search.baselines.group_scores import group_shares
from moevolve.search.genomes.base import Offspring
from moevolve.search.genomes.eep import EepSpace
from moevolve.search.genomes.eep_genome import EepGenome
from moevolve.workers.calibration.base import Calibration


def frequency(space: EepSpace, calibration: Calibration) -> Offspring[EepGenome]:
    """The pruning genome of the most frequent experts, from `counts`."""
    shares = group_shares(calibration.arrays["counts"], space.layer_groups)
    return Offspring(space.from_kept(space.subsets.best(shares)), "frequency", ())
