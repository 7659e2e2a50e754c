"""What takes long to read from a large store, read again only when something happened in it."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Annotated, Any, TypeVar

from fastapi import Depends, Request

from moevolve.store.reader import StoreReader
from moevolve.store.records import BestRow, Control, SearchSummary, Split

T = TypeVar("T")
_KEPT = 64
"""Listings that are kept."""
_LONGEST_S = 10.0
"""Individuals that neither fail nor are the best are no event: after so long a listing is read again anyway."""


class Listings:
    """Listings over all of a store.

    A listing is kept as long as no search is added and none has a new event: a status, a best individual, a failure.

    Args:
        store: the store.
        longest: seconds that one is kept at most.
    """

    def __init__(self, store: StoreReader, longest: float = _LONGEST_S) -> None:
        self._store, self._longest = store, longest
        self._kept: OrderedDict[object, tuple[object, float, Any]] = OrderedDict()
        self._lock = threading.Lock()

    def controls(self) -> dict[str, Control]:
        """Who runs each search and where it stands, by its id; never kept."""
        return self._store.controls()

    def summaries(self, controls: dict[str, Control] | None = None) -> list[SearchSummary]:
        """All searches, oldest first; the caller may have read `controls` already."""
        return self._remembered("searches", self._store.searches, controls)

    def pareto(self, task: str, split: Split, search: str | None) -> list[BestRow]:
        """The configurations that no other beats in both score and parameters."""
        return self._remembered((task, split, search), lambda: self._store.pareto(task, split, search))

    def tasks(self) -> list[str]:
        """Names of the tasks that are searched on."""
        return sorted({task for summary in self.summaries() for task in summary.tasks})

    def _remembered(self, key: object, make: Callable[[], T], controls: dict[str, Control] | None = None) -> T:
        known = self.controls() if controls is None else controls
        seen = tuple((name, control.epoch, control.events) for name, control in sorted(known.items()))
        with self._lock:
            kept = self._kept.get(key)
        if kept is not None and kept[0] == seen and time.monotonic() - kept[1] < self._longest:
            found: T = kept[2]
            return found
        made = make()
        with self._lock:
            self._kept[key] = (seen, time.monotonic(), made)
            self._kept.move_to_end(key)
            while len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
        return made


async def _listings_of(request: Request) -> Listings:
    """Those of the application which got the request."""
    listings: Listings = request.app.state.listings
    return listings


ListingsDep = Annotated[Listings, Depends(_listings_of)]
"""Parameter of a page: the listings of the server that it belongs to."""
