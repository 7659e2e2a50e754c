"""Operators on continuous matrices."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def gaussian_noise(
    rng: np.random.Generator, matrix: NDArray[np.float32], rate: float, sigma: float
) -> NDArray[np.float32]:
    """Add N(0, sigma^2) to each entry of `matrix` (float32 [n', n]) with probability `rate`."""
    noise = rng.standard_normal(matrix.shape) * sigma
    return (matrix + np.where(rng.random(matrix.shape) < rate, noise, 0.0)).astype(np.float32)


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


def normalise_rows(matrix: NDArray[np.float32], smallest: float = 1e-3) -> NDArray[np.float32]:
    """Divide every row of `matrix` (float32 [n', n]) by its sum; rows whose sum is below `smallest` in size stay."""
    sums = matrix.sum(axis=1, keepdims=True)
    return (matrix / np.where(np.abs(sums) < smallest, 1.0, sums)).astype(np.float32)
