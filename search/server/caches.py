"""Results that are slow to read from a large store: listings over all of it, which are cached, and fitness curves."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import numpy as np
from cachetools import TTLCache
from numpy.typing import NDArray

from moevolve.store.costs import SearchCosts
from moevolve.store.reader import StoreReader
from moevolve.store.records import Control, SearchRecord, SearchSummary

T = TypeVar("T")
# Number of results that are kept.
_CACHE_SIZE = 64
# An individual that neither fails nor is the best so far is no event, so cached listings also expire.
_MAX_AGE_S = 10.0


class Listings:
    """Listings over all of a store.

    A listing is valid until a search is added or has a new event: a status, a best individual, a failure.

    Args:
        store: The store to query.
        max_age: Seconds after which a listing expires.
    """

    def __init__(self, store: StoreReader, max_age: float = _MAX_AGE_S) -> None:
        self._store = store
        self._cache: TTLCache[object, Any] = TTLCache(_CACHE_SIZE, max_age)
        self._lock = threading.Lock()

    def controls(self) -> dict[str, Control]:
        """Driver, progress and desired state of each search, by its id; never cached."""
        return self._store.controls()

    def summaries(self) -> list[SearchSummary]:
        """Return all searches, oldest first."""
        return self.cached("searches", self._store.searches)

    def tasks(self) -> list[str]:
        """Return the names of the tasks in any search's fitness."""
        return sorted({task for summary in self.summaries() for task in summary.tasks})

    def models(self) -> dict[str, str]:
        """The path of each model by its fingerprint: that of the newest search, for copies are the same model."""
        return {one.search.model_fingerprint: one.search.model_path for one in self.summaries()}

    def costs(self, search: SearchRecord) -> SearchCosts:
        """Return the cost of a search's evaluations; a sum over all of them."""
        return self.cached(("costs", search.id), partial(self._store.costs, search))

    def cached(self, key: object, read: Callable[[], T]) -> T:
        """Return what `read` returned last for a key, read again if it isn't valid any more."""
        version = tuple((name, control.epoch, control.events) for name, control in sorted(self.controls().items()))
        with self._lock:
            kept = self._cache.get(key)
        if kept is not None and kept[0] == version:
            return kept[1]
        made = read()
        with self._lock:
            self._cache[key] = (version, made)
        return made


# Points of a plot at most: more than the pixels of a wide screen show apart.
MAX_POINTS = 2000


@dataclass(frozen=True, slots=True)
class FitnessCurve:
    """Fitness over individuals' indices, in buckets of equal width.

    All tuples have one entry per bucket; there are none for buckets without any fitness.

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


def down_sampled(fitness: NDArray[np.float64], points: int) -> FitnessCurve:
    """Lowest, highest and best-so-far fitness per bucket.

    Args:
        fitness: Float64, shape (individuals,), NaN for individuals without a fitness.
        points: Maximum number of buckets.
    """
    known = np.flatnonzero(~np.isnan(fitness))
    if not known.size:
        return FitnessCurve(0, 1, (), (), (), (), ())
    individuals = int(known[-1]) + 1
    width = -(-individuals // points)
    values, bucket = fitness[known], known // width
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


def fitness_curve(store: StoreReader, search_id: str, points: int = MAX_POINTS) -> FitnessCurve:
    """Return the curve of a search, with at most `points` buckets."""
    found = dict(store.fitness_by_index(search_id))
    fitness = np.full(max(found, default=-1) + 1, np.nan, dtype=np.float64)
    fitness[list(found)] = list(found.values())
    return down_sampled(fitness, points)
