"""News of a store for the clients that watch it: one query per second serves all of them.

The store isn't queried while nobody watches. Watchers get cursors, not contents: the number of a search's events and of
its complete individuals. They fetch what is new from there. No connection to the store stays open while they wait.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass

from starlette.concurrency import run_in_threadpool

from moevolve.store.errors import StoreError
from moevolve.store.reader import StoreReader

log = logging.getLogger(__name__)

# Each keeps a connection open for as long as it shows a page.
MAX_WATCHERS = 200
# Seconds between queries for changes: people hardly notice shorter ones, and each query reads the store.
_INTERVAL_S = 1.0


@dataclass(frozen=True, slots=True)
class Cursor:
    """Progress of a search.

    Attributes:
        events: Number of events recorded.
        done: Number of complete individuals, as last reported by the driver.
        alive: True while a driver runs the search.
    """

    events: int
    done: int
    alive: bool


class Feed:
    """News of a store's searches.

    Args:
        store: The store to query.
        interval: Seconds between two queries.
    """

    def __init__(self, store: StoreReader, interval: float = _INTERVAL_S) -> None:
        self._store, self._interval = store, interval
        self._now: dict[str, Cursor] = {}
        self._queried, self._changed = asyncio.Event(), asyncio.Condition()
        self._watchers = 0
        self._task: asyncio.Task[None] | None = None
        self._closed = False

    @property
    def is_full(self) -> bool:
        """Whether `MAX_WATCHERS` are watching."""
        return self._watchers >= MAX_WATCHERS

    async def watch(self) -> AsyncGenerator[Mapping[str, Cursor]]:
        """Yield cursors by search id: first those of all searches, then those that changed, whenever any do."""
        sent: dict[str, Cursor] = {}
        self._watchers += 1
        try:
            if self._task is None or self._task.done():
                self._queried.clear()
                self._task = asyncio.create_task(self._run())
            await self._queried.wait()
            while not self._closed:
                news = {key: cursor for key, cursor in self._now.items() if sent.get(key) != cursor}
                if news or not sent:
                    sent = dict(self._now)
                    yield news
                async with self._changed:
                    await self._changed.wait()
        finally:
            self._watchers -= 1

    async def close(self) -> None:
        """End the iteration of all watchers."""
        self._closed = True
        self._queried.set()
        if self._task is not None:
            self._task.cancel()
        async with self._changed:
            self._changed.notify_all()

    async def _run(self) -> None:
        while self._watchers:
            try:
                await self._query()
            except StoreError as error:
                log.warning("news can't be read: %s", error)
            finally:
                self._queried.set()
            await asyncio.sleep(self._interval)

    async def _query(self) -> None:
        controls = await run_in_threadpool(self._store.controls)
        now = {
            key: Cursor(one.events, one.progress.done if one.progress else 0, one.alive)
            for key, one in controls.items()
        }
        if now != self._now:
            self._now = now
            async with self._changed:
                self._changed.notify_all()
