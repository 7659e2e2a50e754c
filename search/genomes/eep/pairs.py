"""One-shot methods that drop the experts whose loss, pair by pair, changes a layer's output least.

With p the indicator of the dropped experts and g_i f_i the weighted output of expert i on a token that chose it (else
0), the squared error of dropping them without rescaling the other weights is, summed over tokens, `p^T G p` with
`G_ij = sum g_i g_j <f_i, f_j>`. `gram` minimises that; `hope` minimises the same with norms instead of inner products,
`F_ij = sum g_i g_j |f_i| |f_j|`, an upper bound that counts opposite outputs as if they added up. Both are sums over
tokens, so they need n x n numbers per layer however many tokens there are.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations
from math import comb

import numpy as np
from numpy.typing import NDArray

from moevolve.search.genomes.contract.base import Offspring
from moevolve.search.genomes.eep.genome import EepGenome
from moevolve.search.genomes.eep.space import EepSpace

_EXHAUSTIVE = 5000
"""Largest number of subsets that are all tried."""
_LEAST_GAIN = 1e-12
"""Smallest gain of a swap, as a share of the error of dropping all experts; smaller ones are rounding errors."""


def drop_by_pairs(operator: str, statistic: str) -> Callable[[EepSpace], Offspring[EepGenome]]:
    """Make the baseline that drops the experts with the least sum of a statistic over their pairs.

    The matrices of a group's layers are divided by the sums of their entries and added.
    """

    def make(space: EepSpace) -> Offspring[EepGenome]:
        matrices = space.statistics[statistic].astype(np.float64)
        totals = matrices.sum(axis=(1, 2), keepdims=True)
        shares = matrices / np.where(totals > 0, totals, 1.0)
        owners = np.array(space.layer_groups)
        groups = [shares[owners == group].sum(axis=0) for group in range(space.groups)]
        every, count = np.arange(space.experts), space.experts - space.retained
        kept = [np.setdiff1d(every, cheapest_to_drop(matrix, count)) for matrix in groups]
        return Offspring(space.from_kept(np.stack(kept)), operator, ())

    return make


def cheapest_to_drop(matrix: NDArray[np.float64], count: int) -> NDArray[np.int64]:
    """Find `count` indices with the least sum of the matrix over their pairs.

    All subsets are tried if there are few. Otherwise indices are added greedily and then swapped one for one, the best
    swap first, until none lowers the sum: a local minimum.

    Args:
        matrix: Symmetric, float64 [n, n].
        count: Number of indices.

    Returns:
        int64 [count], ascending; of equal sums, the first subset that is found.
    """
    size = len(matrix)
    if comb(size, count) <= _EXHAUSTIVE:
        subsets = np.array(list(combinations(range(size), count)), dtype=np.int64)
        sums = matrix[subsets[:, :, None], subsets[:, None, :]].sum(axis=(1, 2))
        return subsets[int(np.argmin(sums))]
    dropped, diagonal = np.zeros(size, dtype=bool), matrix.diagonal()
    for _ in range(count):
        added = diagonal + 2 * matrix[:, dropped].sum(axis=1)
        dropped[int(np.argmin(np.where(dropped, np.inf, added)))] = True
    least = _LEAST_GAIN * float(np.abs(matrix).sum())
    while True:
        sums = matrix[:, dropped].sum(axis=1)
        inside, outside = np.flatnonzero(dropped), np.flatnonzero(~dropped)
        without = 2 * sums[inside] - diagonal[inside]
        within = diagonal[outside][:, None] + 2 * (sums[outside][:, None] - matrix[np.ix_(outside, inside)])
        change = within - without[None, :]
        best = divmod(int(np.argmin(change)), len(inside))
        if change[best] >= -least:
            return inside
        dropped[outside[best[0]]], dropped[inside[best[1]]] = True, False
