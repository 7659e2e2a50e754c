"""Fitness over the individuals of a search, down-sampled to about as many points as a plot has pixels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from moevolve.store.reader import StoreReader

MAX_POINTS = 2000


@dataclass(frozen=True, slots=True)
class FitnessCurve:
    """Fitness over individuals' indices, in buckets of equal width.

    All tuples have one entry per bucket; buckets without any fitness are left out.

    Attributes:
        individuals: Highest index that has a fitness, plus 1.
        width: Number of indices per bucket.
        first: Lowest index in the bucket that has a fitness.
        low, high: Lowest and highest fitness in the bucket.
        at: Index of the individual with the highest fitness, the lowest of several.
        best: Highest fitness up to the end of the bucket.
    """

    individuals: int
    width: int
    first: tuple[int, ...] = field(repr=False)
    low: tuple[float, ...] = field(repr=False)
    high: tuple[float, ...] = field(repr=False)
    at: tuple[int, ...] = field(repr=False)
    best: tuple[float, ...] = field(repr=False)


def fitness_curve(store: StoreReader, search_id: str, points: int = MAX_POINTS) -> FitnessCurve:
    """The curve of a search in at most `points` buckets."""
    return down_sampled(sorted(store.fitness_by_index(search_id)), points)


def down_sampled(fitness: Sequence[tuple[int, float]], points: int) -> FitnessCurve:
    """Lowest, highest and best-so-far fitness per bucket.

    Args:
        fitness: Indices of individuals in ascending order, with their fitness.
        points: Maximum number of buckets.
    """
    if not fitness:
        return FitnessCurve(0, 1, (), (), (), (), ())
    known, values = (np.array(column) for column in zip(*fitness, strict=True))
    individuals = int(known[-1]) + 1
    width = -(-individuals // points)
    bucket = known // width
    starts = np.flatnonzero(np.diff(bucket, prepend=-1))
    high = np.maximum.reduceat(values, starts)
    # The first individual that reaches its bucket's maximum.
    tops = np.flatnonzero(values == np.repeat(high, np.diff(starts, append=values.size)))
    at = known[tops[np.searchsorted(tops, starts)]]
    return FitnessCurve(
        individuals,
        width,
        tuple(known[starts].tolist()),
        tuple(np.minimum.reduceat(values, starts).tolist()),
        tuple(high.tolist()),
        tuple(at.tolist()),
        tuple(np.maximum.accumulate(high).tolist()),
    )
