"""Keep the experts that contribute most to the tokens they are chosen for.

Source: REAP the Experts (https://arxiv.org/abs/2510.13999), Sec. 4: an expert's saliency is the mean, over the tokens
routed to it, of its gate value times the L2 norm of its output; per layer, those of the lowest saliency go. Gate values
are the weights that the layer applies. A group of layers keeps the experts of the highest mean share.
"""

from __future__ import annotations

from moevolve.search.baselines.group_scores import group_shares
from moevolve.search.genomes.base import Offspring
from moevolve.search.genomes.eep import EepSpace
from moevolve.search.genomes.eep_genome import EepGenome
from moevolve.workers.calibration.base import Calibration


def reap(space: EepSpace, calibration: Calibration) -> Offspring[EepGenome]:
    """The pruning genome of the most salient experts, from `saliency`."""
    shares = group_shares(calibration.arrays["saliency"], space.layer_groups)
    return Offspring(space.from_kept(space.subsets.best(shares)), "reap", ())
