"""Initial genomes of the prune phase: uniformly random subsets of experts.

Paper: Efficient Expert Pruning, https://arxiv.org/abs/2407.00945, Sec. 4.3 (random initialisation).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def random_subset(rng: np.random.Generator, groups: int, experts: int, retained: int) -> NDArray[np.int64]:
    """Draw the retained experts of every group.

    Returns:
        int64 [groups, retained], sorted distinct expert indices per row.
    """
    draws = [np.sort(rng.choice(experts, size=retained, replace=False)) for _ in range(groups)]
    return np.stack(draws).astype(np.int64)
