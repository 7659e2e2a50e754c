"""Rows of the merging matrix scaled to sum 1, so that a merged expert keeps the scale of its sources.

Source: the rates released with Efficient Expert Pruning, https://arxiv.org/abs/2407.00945.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def normalise_rows(matrix: NDArray[np.float32], smallest: float = 1e-3) -> NDArray[np.float32]:
    """Divide every row of `matrix` (float32 [n', n]) by its sum; rows whose sum is below `smallest` in size stay."""
    sums = matrix.sum(axis=1, keepdims=True)
    return (matrix / np.where(np.abs(sums) < smallest, 1.0, sums)).astype(np.float32)
