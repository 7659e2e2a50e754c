"""Evolutionary operators on plain arrays: layers, continuous matrices, subsets of experts, partitions, layers' sizes.

Randomness is counter-based: every individual has its own generator, from which operators draw, so the order of events
changes nothing.
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from moevolve.evaluators.errors import UserError


def generator(seed: int, index: int, stream: str = "individual") -> np.random.Generator:
    """Return the generator of individual `index` in the search seeded `seed`.

    It is Philox keyed by (seed, stream, index) through `SeedSequence`: the same on every platform. `stream` keeps
    independent uses of one seed apart, and says what `index` >= 0 counts.
    """
    key = (*stream.encode(), index)
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(entropy=seed, spawn_key=key)))


Label = TypeVar("Label", bound=np.integer)


def select_groups(rng: np.random.Generator, groups: int, rate: float) -> NDArray[np.int64]:
    """Draw groups with probability `rate` each, or one at random if none is drawn: int64 indices, increasing."""
    chosen = np.flatnonzero(rng.random(groups) < rate)
    if chosen.size == 0:
        chosen = np.array([rng.integers(groups)])
    return chosen.astype(np.int64)


def select_matrices(rng: np.random.Generator, shape: tuple[int, ...], rate: float) -> NDArray[np.bool_]:
    """Draw matrices with probability `rate` > 0 each, again until at least one is drawn: bool of `shape`."""
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


# Probability that a row or a whole matrix comes from the first parent, as in the authors' released configuration; the
# order of the parents is drawn.
FIRST_PARENT = 0.6


def matrix_crossover(
    rng: np.random.Generator,
    first: NDArray[np.float32],
    second: NDArray[np.float32],
    by_rows: bool,
) -> NDArray[np.float32]:
    """Combine two matrices, float32 [n', n], row by row, or take one of them whole.

    Source: EEP (arXiv 2407.00945), Sec. 4.3 and App. C.
    """
    return np.where(rng.random((len(first) if by_rows else 1, 1)) < FIRST_PARENT, first, second)


def normalise_rows(matrix: NDArray[np.float32], smallest: float = 1e-3) -> NDArray[np.float32]:
    """Divide every row of `matrix` (float32 [n', n]) by its sum; rows with |sum| < `smallest` stay."""
    sums = matrix.sum(axis=1, keepdims=True)
    return (matrix / np.where(np.abs(sums) < smallest, 1.0, sums)).astype(np.float32)


def random_subset(rng: np.random.Generator, groups: int, experts: int, retained: int) -> NDArray[np.int64]:
    """Draw the retained experts of every group: int64 [groups, retained], sorted distinct indices per row."""
    draws = [np.sort(rng.choice(experts, size=retained, replace=False)) for _ in range(groups)]
    return np.stack(draws).astype(np.int64)


def replace_experts(rng: np.random.Generator, kept: NDArray[np.int64], experts: int, rate: float) -> NDArray[np.int64]:
    """Replace each retained expert with probability `rate` by one that no other row retains.

    They are replaced one after the other in random order, so that a replaced expert can be drawn again.

    Args:
        kept: Retained experts of one group, int64 [retained], distinct.
        experts: Number of experts n to choose from.

    Returns:
        int64 [retained], distinct; rows that aren't replaced stay. The set doesn't depend on the order of `kept`.
    """
    child = kept.copy()
    for row in rng.permutation(np.argsort(kept)[rng.random(kept.size) < rate]):
        child[row] = rng.choice(np.setdiff1d(np.arange(experts), np.delete(child, row)))
    return child


def subset_crossover(
    rng: np.random.Generator, first: NDArray[np.int64], second: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Combine two sets of retained experts, each int64 [retained] and distinct.

    Experts that both parents retain stay; the rest is drawn from those that one of them retains. Since rows are
    interchangeable, this is a row-wise crossover without duplicates. What the first parent retains keeps its row there.
    """
    common = np.intersect1d(first, second)
    either = np.setxor1d(first, second)
    drawn = rng.choice(either, size=first.size - common.size, replace=False)
    child = first.copy()
    child[~np.isin(first, np.concatenate([common, drawn]))] = np.setdiff1d(drawn, first)
    return child


def balanced_swaps(rng: np.random.Generator, labels: NDArray[Label], rate: float) -> NDArray[Label]:
    """Permute the labels of some members at random, which keeps the size of every part of the partition.

    `labels` [members] are the indices of the members' parts; a member is drawn with probability `rate`.
    """
    hit = np.flatnonzero(rng.random(labels.size) < rate)
    child = labels.copy()
    child[hit] = labels[rng.permutation(hit)]
    return child


# After 200 halvings the interval of the level is a rounding error wide, whatever the weights.
_BISECTIONS = 200
# Bisection leaves sizes that should be whole a rounding error below.
_SIZE_TOLERANCE = 1e-9


def divided(
    weights: NDArray[np.float64],
    least: NDArray[np.float64],
    most: NDArray[np.float64],
    costs: NDArray[np.float64],
    total: float,
) -> NDArray[np.float64]:
    """Find the sizes `clip(level * weights, least, most)` of cost `total` by bisection of the level.

    Args:
        weights: Relative sizes, above 0; all arrays have one shape.
        least, most: Bounds of each size.
        costs: Cost per unit of each size.
        total: Cost of all sizes together, between the costs of `least` and of `most`.
    """
    low, high = 0.0, float((most / weights).max())
    for _ in range(_BISECTIONS):
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

    Raises:
        UserError: The sizes aren't finite.
    """
    if not np.isfinite(ideal).all():
        raise UserError(
            "layers can't be given sizes, because the importance of their experts isn't finite: look for NaN and "
            "infinity among the checkpoint's weights"
        )
    sizes = np.floor(ideal + _SIZE_TOLERANCE).astype(np.int64)
    while (missing := total - int(sizes.sum())) != 0:
        step = 1 if missing > 0 else -1
        free = sizes < most if step > 0 else sizes > least
        urgency = np.where(free, step * (ideal - sizes), -np.inf)
        sizes[np.argsort(-urgency, kind="stable")[: min(abs(missing), int(free.sum()))]] += step
    return sizes
