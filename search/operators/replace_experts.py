"""Mutation of the prune phase: retained experts give way to experts not in use.

Paper: Efficient Expert Pruning, https://arxiv.org/abs/2407.00945, App. C (mutation in the pruning phase).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def replace_experts(
    rng: np.random.Generator, kept: NDArray[np.int64], experts: int, rate: float, at_least_one: bool = False
) -> NDArray[np.int64]:
    """Replace each retained expert with probability `rate` by one that is not in use.

    Args:
        kept: int64 [retained], distinct expert indices of one group.
        experts: experts n.
        rate: probability per retained expert.
        at_least_one: force one replacement when the draw made none.

    Returns:
        int64 [retained], sorted and distinct. Unchanged when all n experts are retained.
    """
    unused = np.setdiff1d(np.arange(experts), kept)
    hit = rng.random(kept.size) < rate
    if at_least_one and not hit.any():
        hit[rng.integers(kept.size)] = True
    slots = rng.permutation(np.flatnonzero(hit))[: unused.size]
    child = kept.copy()
    child[slots] = rng.choice(unused, size=slots.size, replace=False)
    return np.sort(child)
