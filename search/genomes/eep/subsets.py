"""Subsets of retained experts, as the prune phase draws, crosses and mutates them.

Families that limit a token's choice to groups of experts (`moevolve.kernels.routing_rule`) keep n' / R experts in every
one of their R routing groups: new group r holds what is kept of old group r, so that the limit goes on meaning what it
did. Each routing group is then a smaller subset problem of its own. With R = 1 there is one, over all experts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moevolve.search.genomes.contract.operators import random_subset, replace_experts, subset_crossover

Kept = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Subsets:
    """All subsets of n' of n experts that keep as many in each of R routing groups.

    Attributes:
        experts: n, a multiple of R.
        retained: n', a multiple of R.
        parts: R.
    """

    experts: int
    retained: int
    parts: int = 1

    def sample(self, rng: np.random.Generator, groups: int) -> Kept:
        """Uniformly random subsets for groups of layers: int64 [groups, n'], sorted."""
        size = self.experts // self.parts
        within = random_subset(rng, groups * self.parts, size, self.retained // self.parts)
        starts = np.arange(self.parts)[:, None] * size
        return (within.reshape(groups, self.parts, -1) + starts).reshape(groups, self.retained)

    def cross(self, rng: np.random.Generator, first: Kept, second: Kept) -> Kept:
        """A child of two subsets, int64 [n'] each and sorted; see `subset_crossover`."""
        pairs = zip(first.reshape(self.parts, -1), second.reshape(self.parts, -1), strict=True)
        return np.concatenate([subset_crossover(rng, one, two) for one, two in pairs])

    def mutate(
        self, rng: np.random.Generator, kept: Kept, rate: float, *, redraw: bool = False, at_least_one: bool = False
    ) -> Kept:
        """A subset, int64 [n'] and sorted, with some experts replaced by others of their routing group.

        Args:
            kept: what is retained.
            rate: probability per retained expert.
            redraw: see `replace_experts`.
            at_least_one: force one replacement, in a routing group drawn at random, when the draw made none.
        """
        size = self.experts // self.parts
        divided = kept.reshape(self.parts, -1) % size
        forced = at_least_one and self.parts == 1
        parts = [replace_experts(rng, part, size, rate, redraw=redraw, at_least_one=forced) for part in divided]
        child = np.stack(parts)
        if at_least_one and not forced and np.array_equal(child, divided):
            part = rng.integers(self.parts)
            child[part] = replace_experts(rng, child[part], size, 0.0, at_least_one=True)
        return (child + np.arange(self.parts)[:, None] * size).reshape(-1)

    def best(self, scores: NDArray[np.float64]) -> Kept:
        """The subsets of highest scores [groups, n] (ties: lower index): int64 [groups, n'], sorted."""
        divided = scores.reshape(len(scores), self.parts, -1)
        order = np.argsort(-divided, axis=2, kind="stable")[:, :, : self.retained // self.parts]
        starts = np.arange(self.parts)[:, None] * (self.experts // self.parts)
        return (np.sort(order, axis=2) + starts).reshape(len(scores), self.retained).astype(np.int64)

    def holds(self, kept: Kept) -> bool:
        """Whether every row of `kept` [groups, n'] is sorted and keeps as many experts of every routing group."""
        part = kept // (self.experts // self.parts)
        expected = np.arange(self.retained) // (self.retained // self.parts)
        return bool((np.diff(kept, axis=1) > 0).all() and (part == expected).all())
