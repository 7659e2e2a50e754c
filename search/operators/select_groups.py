"""Which groups of layers a mutation touches: each with the same probability, at least one.

Source: the rates released with Efficient Expert Pruning, https://arxiv.org/abs/2407.00945.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def select_groups(rng: np.random.Generator, groups: int, rate: float) -> NDArray[np.int64]:
    """Indices (int64, increasing) of the groups chosen, each with probability `rate`; one at random if none was."""
    chosen = np.flatnonzero(rng.random(groups) < rate)
    if chosen.size == 0:
        chosen = np.array([rng.integers(groups)])
    return chosen.astype(np.int64)
