"""Divides a total among layers in proportion to weights, within bounds."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_STEPS = 200
_EPS = 1e-9


def divided(
    weights: NDArray[np.float64],
    least: NDArray[np.float64],
    most: NDArray[np.float64],
    costs: NDArray[np.float64],
    total: float,
) -> NDArray[np.float64]:
    """Find the sizes `clip(level * weights, least, most)` of cost `total` by bisection of the level.

    All arrays have one shape.

    Args:
        weights: Relative sizes, above 0.
        least, most: Bounds of each size.
        costs: Cost per unit of each size.
        total: Cost of all sizes together, between the costs of `least` and of `most`.
    """
    low, high = 0.0, float((most / weights).max())
    for _ in range(_STEPS):
        level = (low + high) / 2
        spent = float((np.clip(level * weights, least, most) * costs).sum())
        low, high = (level, high) if spent <= total else (low, level)
    return np.clip(high * weights, least, most)


def rounded(ideal: NDArray[np.float64], total: int, least: int, most: int) -> NDArray[np.int64]:
    """Round sizes to integers of sum `total` by the largest remainder method (ties: the lower layer).

    Args:
        ideal: Sizes within the bounds, [layers].
        total: Sum of the integers, between `least` and `most` times the number of layers.
        least, most: Bounds of each integer.
    """
    sizes = np.floor(ideal + _EPS).astype(np.int64)
    while (missing := total - int(sizes.sum())) != 0:
        step = 1 if missing > 0 else -1
        free = sizes < most if step > 0 else sizes > least
        urgency = np.where(free, step * (ideal - sizes), -np.inf)
        sizes[np.argsort(-urgency, kind="stable")[: min(abs(missing), int(free.sum()))]] += step
    return sizes
