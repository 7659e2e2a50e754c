"""Evolutionary operators on plain arrays, each with the generator it draws from passed in.

They work on layers or groups of them, on continuous matrices, on subsets of experts and on divisions into groups of
equal size.
"""

from __future__ import annotations

from typing import Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

Label = TypeVar("Label", bound=np.integer)


def layer_crossover(rng: np.random.Generator, layers: int) -> NDArray[np.bool_]:
    """Which layers come from the second parent: bool [layers], each with probability one half."""
    return rng.random(layers) < 0.5


def select_groups(rng: np.random.Generator, groups: int, rate: float) -> NDArray[np.int64]:
    """Indices (int64, increasing) of the groups chosen, each with probability `rate`; one at random if none was."""
    chosen = np.flatnonzero(rng.random(groups) < rate)
    if chosen.size == 0:
        chosen = np.array([rng.integers(groups)])
    return chosen.astype(np.int64)


def select_matrices(rng: np.random.Generator, shape: tuple[int, ...], rate: float) -> NDArray[np.bool_]:
    """Which matrices are chosen (bool, `shape`): each with probability `rate` > 0, drawn again until one is."""
    while True:
        chosen = rng.random(shape) < rate
        if chosen.any():
            return chosen


def gaussian_noise(
    rng: np.random.Generator, matrix: NDArray[np.float32], rate: float, sigma: float
) -> NDArray[np.float32]:
    """Add N(0, sigma^2) to each entry of `matrix` (float32 [n', n]) with probability `rate`."""
    noise = rng.standard_normal(matrix.shape) * sigma
    return (matrix + np.where(rng.random(matrix.shape) < rate, noise, 0.0)).astype(np.float32)


def matrix_crossover(
    rng: np.random.Generator,
    first: NDArray[np.float32],
    second: NDArray[np.float32],
    first_parent_rate: float,
    units: Literal["whole", "rows", "entries"],
) -> NDArray[np.float32]:
    """Combine two matrices of equal shape, unit by unit.

    Source: EEP (arXiv 2407.00945), Sec. 4.3 (entries, whole matrices) and App. C (rows).

    Args:
        rng: what is drawn from.
        first: float32 [n', n].
        second: float32 [n', n].
        first_parent_rate: probability that a unit is the first one's.
        units: what comes from one of them as a whole.
    """
    rows, columns = first.shape
    shape = {"whole": (1, 1), "rows": (rows, 1), "entries": (rows, columns)}[units]
    return np.where(rng.random(shape) < first_parent_rate, first, second)


def normalise_rows(matrix: NDArray[np.float32], smallest: float = 1e-3) -> NDArray[np.float32]:
    """Divide every row of `matrix` (float32 [n', n]) by its sum; rows whose sum is below `smallest` in size stay."""
    sums = matrix.sum(axis=1, keepdims=True)
    return (matrix / np.where(np.abs(sums) < smallest, 1.0, sums)).astype(np.float32)


def random_subset(rng: np.random.Generator, groups: int, experts: int, retained: int) -> NDArray[np.int64]:
    """Draw the retained experts of every group.

    Returns:
        int64 [groups, retained], sorted distinct expert indices per row.
    """
    draws = [np.sort(rng.choice(experts, size=retained, replace=False)) for _ in range(groups)]
    return np.stack(draws).astype(np.int64)


def replace_experts(
    rng: np.random.Generator,
    kept: NDArray[np.int64],
    experts: int,
    rate: float,
    *,
    redraw: bool = False,
    at_least_one: bool = False,
) -> NDArray[np.int64]:
    """Replace each retained expert with probability `rate` by one that is not in use.

    Args:
        kept: int64 [retained], distinct expert indices of one group.
        experts: experts n.
        rate: probability per retained expert.
        redraw: replace one after the other, in random order; what is replaced is no longer in use, so that it may be
            drawn again at once or for a later one. Otherwise experts come in that were not in use before.
        at_least_one: force one replacement when the draw made none; not with `redraw`.

    Returns:
        int64 [retained], sorted and distinct. Unchanged when all n experts are retained.
    """
    hit = rng.random(kept.size) < rate
    if redraw:
        return _redrawn(rng, kept, experts, hit)
    unused = np.setdiff1d(np.arange(experts), kept)
    if at_least_one and not hit.any():
        hit[rng.integers(kept.size)] = True
    slots = rng.permutation(np.flatnonzero(hit))[: unused.size]
    child = kept.copy()
    child[slots] = rng.choice(unused, size=slots.size, replace=False)
    return np.sort(child)


def _redrawn(
    rng: np.random.Generator, kept: NDArray[np.int64], experts: int, hit: NDArray[np.bool_]
) -> NDArray[np.int64]:
    child = kept.copy()
    for slot in rng.permutation(np.flatnonzero(hit)):
        child[slot] = rng.choice(np.setdiff1d(np.arange(experts), np.delete(child, slot)))
    return np.sort(child)


def subset_crossover(
    rng: np.random.Generator, first: NDArray[np.int64], second: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Combine two sets of retained experts.

    Experts that both parents retain stay; the remaining places are filled from those that only one of them retains.
    Rows are interchangeable, so this is the row-wise choice without collisions.

    Args:
        first: int64 [retained], distinct.
        second: int64 [retained], distinct.

    Returns:
        int64 [retained], sorted and distinct.
    """
    common = np.intersect1d(first, second)
    either = np.setxor1d(first, second)
    drawn = rng.choice(either, size=first.size - common.size, replace=False)
    return np.sort(np.concatenate([common, drawn])).astype(np.int64)


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
