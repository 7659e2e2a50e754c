"""Crossover of the prune phase: rows of the one-hot matrices from either parent, kept distinct.

Paper: Efficient Expert Pruning, https://arxiv.org/abs/2407.00945, App. C (combination along the retained experts).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def subset_crossover(
    rng: np.random.Generator, first: NDArray[np.int64], second: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Combine two sets of retained experts.

    Experts that both parents retain stay; the remaining places are filled from those that only one of them retains.
    Rows are interchangeable, so this is the row-wise choice without collisions.

    Args:
        first: int64 [retained], distinct.
        second: int64 [retained], distinct.

    Returns:
        int64 [retained], sorted and distinct.
    """
    common = np.intersect1d(first, second)
    either = np.setxor1d(first, second)
    drawn = rng.choice(either, size=first.size - common.size, replace=False)
    return np.sort(np.concatenate([common, drawn])).astype(np.int64)
