"""Keep the experts with the largest sum of routing weights.

Source: Efficient Expert Pruning (https://arxiv.org/abs/2407.00945), App. A.2, baseline 3 (after SEER-MoE,
https://arxiv.org/abs/2404.05089): the router's weight for each expert, accumulated on the training set, per layer. The
weights are the softmax over all experts, which the paper calls routing weights (Sec. 3). A group of layers keeps the
experts of the highest mean share.
"""

from __future__ import annotations

from moevolve.search.baselines.group_scores import group_shares
from moevolve.search.genomes.base import Offspring
from moevolve.search.genomes.eep import EepSpace
from moevolve.search.genomes.eep_genome import EepGenome
from moevolve.workers.calibration.base import Calibration


def soft_activation(space: EepSpace, calibration: Calibration) -> Offspring[EepGenome]:
    """The pruning genome of the experts with most routing weight, from `soft_activation`."""
    shares = group_shares(calibration.arrays["soft_activation"], space.layer_groups)
    return Offspring(space.from_kept(space.subsets.best(shares)), "soft_activation", ())
