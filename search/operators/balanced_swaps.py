"""Mutation of a division into equal parts: some members trade places, so that every part keeps its size."""

from __future__ import annotations

from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

Label = TypeVar("Label", bound=np.integer)


def balanced_swaps(rng: np.random.Generator, labels: NDArray[Label], rate: float) -> NDArray[Label]:
    """Let each member with probability `rate` into a draw of lots for the places of those in it.

    Args:
        labels: part of every member, [members].
        rate: probability per member.

    Returns:
        [members], every part as large as before.
    """
    hit = np.flatnonzero(rng.random(labels.size) < rate)
    child = labels.copy()
    child[hit] = labels[rng.permutation(hit)]
    return child
