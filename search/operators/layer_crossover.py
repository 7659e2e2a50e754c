"""Crossover of genomes whose layers are independent of each other: every layer whole, from either parent."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def layer_crossover(rng: np.random.Generator, layers: int) -> NDArray[np.bool_]:
    """Which layers come from the second parent: bool [layers], each with probability one half."""
    return rng.random(layers) < 0.5
