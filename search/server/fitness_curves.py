"""The course of a search as a plot needs it: as many points as there are pixels, however many individuals there are."""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from moevolve.store.reader import StoreReader

MOST_POINTS = 2000
_KEPT = 8
"""Searches whose individuals' fitness is kept: 4 bytes each."""


@dataclass(frozen=True, slots=True)
class FitnessCurve:
    """Fitness over index, in buckets of equal width.

    All lists have one entry per bucket that has an individual with a fitness.

    Attributes:
        individuals: highest index with a fitness + 1.
        width: indices per bucket.
        first: index of a bucket's first individual with a fitness.
        low, high: least and most fitness in it.
        at: index of the one with the most, the earliest of several.
        best: most fitness up to its end.
    """

    individuals: int
    width: int
    first: tuple[int, ...] = field(repr=False)
    low: tuple[float, ...] = field(repr=False)
    high: tuple[float, ...] = field(repr=False)
    at: tuple[int, ...] = field(repr=False)
    best: tuple[float, ...] = field(repr=False)


def down_sampled(fitness: NDArray[np.float32], points: int) -> FitnessCurve:
    """The least, the most and the best so far, bucket by bucket.

    Args:
        fitness: [individuals], by index; NaN where there is none.
        points: at most so many buckets.
    """
    known = np.flatnonzero(~np.isnan(fitness))
    if not known.size:
        return FitnessCurve(0, 1, (), (), (), (), ())
    individuals = int(known[-1]) + 1
    width = -(-individuals // points)
    values, bucket = fitness[known].astype(np.float64), known // width
    starts = np.flatnonzero(np.diff(bucket, prepend=-1))
    high = np.maximum.reduceat(values, starts)
    # The first of those that reach their bucket's most.
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


@dataclass(slots=True)
class _Known:
    """What is known of a search: its fitness by index, from where on it isn't complete, and events looked at."""

    fitness: NDArray[np.float32]
    frontier: int = 0
    events: int = 0


class FitnessCurves:
    """Fitness curves of a store's searches; only what is new of one is read again.

    Args:
        store: the store.
    """

    def __init__(self, store: StoreReader) -> None:
        self._store = store
        self._known: OrderedDict[str, _Known] = OrderedDict()
        self._lock = threading.Lock()

    def course(self, search_id: str, points: int = MOST_POINTS) -> FitnessCurve:
        """Down-sampled to at most so many points."""
        with self._lock:
            known = self._up_to_date(search_id)
            fitness = known.fitness
        return down_sampled(fitness, points)

    def _up_to_date(self, search_id: str) -> _Known:
        known = self._known.pop(search_id, None) or _Known(np.empty(0, dtype=np.float32))
        events = self._store.control(search_id).events
        # A retry takes individuals back.
        if any(event.kind == "retried" for event in self._store.events({search_id: known.events})):
            known = _Known(np.empty(0, dtype=np.float32))
        rows = self._store.fitness_by_index(search_id, known.frontier)
        if rows:
            indices, values = (np.array(column) for column in zip(*rows, strict=True))
            fitness = np.full(max(len(known.fitness), int(indices.max()) + 1), np.nan, dtype=np.float32)
            fitness[: len(known.fitness)] = known.fitness
            fitness[indices] = values
            # Individuals come to an end in any order, and failed ones have no fitness: those of the last stretch are
            # asked for again.
            known = _Known(fitness, max(0, int(indices.max()) - _UNSETTLED))
        known.events = events
        self._known[search_id] = known
        while len(self._known) > _KEPT:
            self._known.popitem(last=False)
        return known


_UNSETTLED = 4096
"""Far more than any window: before the last so many individuals, all are complete."""
