"""Crossover of the merge phase: mix the entries of two parents' matrices, or take one parent's matrix whole.

Paper: Efficient Expert Pruning, https://arxiv.org/abs/2407.00945, Sec. 4.3.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def matrix_crossover(
    rng: np.random.Generator, first: NDArray[np.float32], second: NDArray[np.float32], whole_rate: float = 0.5
) -> NDArray[np.float32]:
    """Combine two matrices of equal shape.

    Args:
        first: float32 [n', n].
        second: float32 [n', n].
        whole_rate: probability of taking one parent's matrix whole (either with equal probability) rather than choosing
            every entry from either parent.
    """
    if rng.random() < whole_rate:
        return (first if rng.random() < 0.5 else second).copy()
    return np.where(rng.random(first.shape) < 0.5, first, second)
