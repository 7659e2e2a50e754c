"""Mutation of the merge phase: Gaussian noise on some entries.

Paper: Efficient Expert Pruning, https://arxiv.org/abs/2407.00945, Sec. 4.3 and App. C.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def gaussian_noise(
    rng: np.random.Generator, matrix: NDArray[np.float32], rate: float, sigma: float
) -> NDArray[np.float32]:
    """Add N(0, sigma^2) to each entry of `matrix` (float32 [n', n]) with probability `rate`."""
    noise = rng.standard_normal(matrix.shape) * sigma
    return (matrix + np.where(rng.random(matrix.shape) < rate, noise, 0.0)).astype(np.float32)
