"""Baselines that keep the experts of the highest score, one score per expert."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from moevolve.search.genomes.contract.base import Offspring
from moevolve.search.genomes.eep.genome import EepGenome
from moevolve.search.genomes.eep.space import EepSpace


def group_shares(scores: NDArray[np.floating | np.integer], layer_groups: Sequence[int]) -> NDArray[np.float64]:
    """Mean, over the layers of each group, of every layer's scores as shares of their sum.

    Args:
        scores: [layers, ...], at least 0.
        layer_groups: group of every layer.

    Returns:
        float64 [groups, ...].
    """
    values = scores.astype(np.float64)
    totals = values.sum(axis=tuple(range(1, values.ndim)), keepdims=True)
    shares = values / np.where(totals > 0, totals, 1.0)
    owners = np.array(layer_groups)
    return np.stack([shares[owners == group].mean(axis=0) for group in range(owners.max() + 1)])


def frequency(space: EepSpace) -> Offspring[EepGenome]:
    """The pruning genome of the most frequent experts, from `counts`."""
    shares = group_shares(space.measured["counts"], space.layer_groups)
    return Offspring(space.from_kept(space.subsets.best(shares)), "frequency", ())


def soft_activation(space: EepSpace) -> Offspring[EepGenome]:
    """The pruning genome of the experts with most routing weight, from `soft_activation`."""
    shares = group_shares(space.measured["soft_activation"], space.layer_groups)
    return Offspring(space.from_kept(space.subsets.best(shares)), "soft_activation", ())


def reap(space: EepSpace) -> Offspring[EepGenome]:
    """The pruning genome of the most salient experts, from `saliency`."""
    shares = group_shares(space.measured["saliency"], space.layer_groups)
    return Offspring(space.from_kept(space.subsets.best(shares)), "reap", ())
