"""Subsets of retained experts, their operators, and the width of experts that have a share of the neurons.

Families that limit a token's choice to groups of experts (`moevolve.kernels.routing_rule`) keep n' / R experts in each
of their R routing groups, so that the limit keeps its meaning: new group r holds the kept experts of old group r, which
are the r-th n' / R rows. Each routing group is a subset problem of its own; R = 1 is one problem over all experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moevolve.search.genomes.contract.operators import random_subset, replace_experts, subset_crossover

Kept = NDArray[np.int64]
# Fewest steps in a width, since rounding down loses up to one of them.
_STEPS = 32
# Shares may fall short of a whole number of neurons by a rounding error.
_EPS = 1e-9


@dataclass(frozen=True, slots=True)
class Subsets:
    """All subsets of n' of n experts that keep equally many in each of R routing groups.

    Attributes:
        experts: Number of experts n, a multiple of R.
        retained: Number of retained experts n', a multiple of R.
        routing_groups: Number of routing groups R.
    """

    experts: int
    retained: int
    routing_groups: int = 1

    def sample(self, rng: np.random.Generator, groups: int) -> Kept:
        """Draw uniformly random subsets for groups of layers: int64 [groups, n'], sorted."""
        size = self.experts // self.routing_groups
        within = random_subset(rng, groups * self.routing_groups, size, self.retained // self.routing_groups)
        starts = np.arange(self.routing_groups)[:, None] * size
        return (within.reshape(groups, self.routing_groups, -1) + starts).reshape(groups, self.retained)

    def crossover(self, rng: np.random.Generator, first: Kept, second: Kept) -> Kept:
        """Return a child of two subsets, each int64 [n']; see `subset_crossover`."""
        pairs = zip(first.reshape(self.routing_groups, -1), second.reshape(self.routing_groups, -1), strict=True)
        return np.concatenate([subset_crossover(rng, one, two) for one, two in pairs])

    def mutate(self, rng: np.random.Generator, kept: Kept, rate: float) -> Kept:
        """Replace each expert of a subset, int64 [n'], with probability `rate` by one of its routing group."""
        size = self.experts // self.routing_groups
        divided = kept.reshape(self.routing_groups, -1) % size
        child = np.stack([replace_experts(rng, part, size, rate) for part in divided])
        return (child + np.arange(self.routing_groups)[:, None] * size).reshape(-1)

    def best(self, scores: NDArray[np.float64]) -> Kept:
        """Return the experts of the highest scores [groups, n] (ties: lower index): int64 [groups, n'], sorted."""
        divided = scores.reshape(len(scores), self.routing_groups, -1)
        order = np.argsort(-divided, axis=2, kind="stable")[:, :, : self.retained // self.routing_groups]
        starts = np.arange(self.routing_groups)[:, None] * (self.experts // self.routing_groups)
        return (np.sort(order, axis=2) + starts).reshape(len(scores), self.retained).astype(np.int64)


def mean_shares(scores: NDArray[np.floating | np.integer], layer_groups: Sequence[int]) -> NDArray[np.float64]:
    """Divide each layer's scores [layers, ...] by their sum and average over each group's layers: [groups, ...]."""
    values = scores.astype(np.float64)
    totals = values.sum(axis=tuple(range(1, values.ndim)), keepdims=True)
    shares = values / np.where(totals > 0, totals, 1.0)
    owners = np.array(layer_groups)
    return np.stack([shares[owners == group].mean(axis=0) for group in range(owners.max() + 1)])


def width_step(neurons: int, width: float) -> int:
    """Return the step of widths for original experts of so many neurons; a wanted width has at least 32 steps.

    It is a power of 2 that divides an original expert's width, at most 64, and at least 8 where possible, even if the
    wanted width has fewer steps then.
    """
    most = max(8, width / _STEPS)
    return max(step for step in (1, 2, 4, 8, 16, 32, 64) if neurons % step == 0 and step <= most)


def even_width(share: float, neurons: int) -> int:
    """Return the largest number of whole steps within a share of `neurons`; 0 if it is less than one step."""
    width = share * neurons + _EPS
    step = width_step(neurons, width)
    return int(width / step) * step
