"""A cache of the queries that are slow on a large store, repeated only when something has happened in it."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from moevolve.store.costs import SearchCosts
from moevolve.store.reader import StoreReader
from moevolve.store.records import Control, SearchRecord, SearchSummary

T = TypeVar("T")
_CACHE_SIZE = 64
"""Number of results that are kept; the least recently made go first."""
_MAX_AGE_S = 10.0
"""An individual that neither fails nor is the best so far is no event, so cached listings also expire."""


class Listings:
    """Listings over all of a store.

    A listing is valid until a search is added or has a new event: a status, a best individual, a failure.

    Args:
        store: The store to query.
        max_age: Seconds after which a listing expires.
    """

    def __init__(self, store: StoreReader, max_age: float = _MAX_AGE_S) -> None:
        self._store, self._max_age = store, max_age
        self._cache: OrderedDict[object, tuple[object, float, Any]] = OrderedDict()
        self._lock = threading.Lock()

    def controls(self) -> dict[str, Control]:
        """Driver, progress and desired state of each search, by its id; never cached."""
        return self._store.controls()

    def summaries(self) -> list[SearchSummary]:
        """All searches, oldest first."""
        return self.cached("searches", self._store.searches)

    def tasks(self) -> list[str]:
        """Names of the tasks in any search's fitness."""
        return sorted({task for summary in self.summaries() for task in summary.tasks})

    def models(self) -> dict[str, str]:
        """The path of each model by its fingerprint: that of the newest search, for copies are the same model."""
        return {one.search.model_fingerprint: one.search.model_path for one in self.summaries()}

    def costs(self, search: SearchRecord) -> SearchCosts:
        """The cost of a search's evaluations; a sum over all of them."""
        return self.cached(("costs", search.id), partial(self._store.costs, search))

    def cached(self, key: object, read: Callable[[], T]) -> T:
        """What `read` returned last for a key, read again if it isn't valid any more."""
        version = tuple((name, control.epoch, control.events) for name, control in sorted(self.controls().items()))
        with self._lock:
            entry = self._cache.get(key)
        if entry is not None and entry[0] == version and time.monotonic() - entry[1] < self._max_age:
            found: T = entry[2]
            return found
        made = read()
        with self._lock:
            self._cache[key] = (version, time.monotonic(), made)
            self._cache.move_to_end(key)
            while len(self._cache) > _CACHE_SIZE:
                self._cache.popitem(last=False)
        return made
