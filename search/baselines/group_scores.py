"""From what was measured per layer to one choice per group of layers.

Layers of a group weigh equally: each layer's scores are divided by their sum first, since the size of activations grows
with depth and would let the last layers decide. With one layer per group that changes no order.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def group_shares(scores: NDArray[np.floating | np.integer], layer_groups: Sequence[int]) -> NDArray[np.float64]:
    """Mean, over the layers of each group, of every layer's scores as shares of their sum.

    Args:
        scores: [layers, ...], at least 0.
        layer_groups: group of every layer.

    Returns:
        float64 [groups, ...].
    """
    values = scores.astype(np.float64)
    totals = values.sum(axis=tuple(range(1, values.ndim)), keepdims=True)
    shares = values / np.where(totals > 0, totals, 1.0)
    owners = np.array(layer_groups)
    return np.stack([shares[owners == group].mean(axis=0) for group in range(owners.max() + 1)])


def highest(scores: NDArray[np.float64], retained: int) -> NDArray[np.int64]:
    """The experts of the highest scores.

    Args:
        scores: [groups, n].
        retained: experts n' to keep.

    Returns:
        int64 [groups, n'], sorted; of equal scores the lower index.
    """
    order = np.argsort(-scores, axis=1, kind="stable")
    return np.sort(order[:, :retained], axis=1).astype(np.int64)
