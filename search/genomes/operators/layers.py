"""Operators on whole layers, or groups of layers."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def layer_crossover(rng: np.random.Generator, layers: int) -> NDArray[np.bool_]:
    """Which layers come from the second parent: bool [layers], each with probability one half."""
    return rng.random(layers) < 0.5


def select_groups(rng: np.random.Generator, groups: int, rate: float) -> NDArray[np.int64]:
    """Indices (int64, increasing) of the groups chosen, each with probability `rate`; one at random if none was."""
    chosen = np.flatnonzero(rng.random(groups) < rate)
    if chosen.size == 0:
        chosen = np.array([rng.integers(groups)])
    return chosen.astype(np.int64)
