"""What changed, for whoever watches: one look at the store each second serves all who do, and none happens for nobody.

Watchers get cursors, not contents: how many events a search has and how many individuals are done. What they want of
that they fetch, from where they were. Nobody's connection to the store stays open while they wait.
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

MOST_WATCHERS = 200
"""Each holds a connection for as long as it looks at a page."""
_EVERY_S = 1.0
_SLOWEST_S = 30.0
"""Between two looks at a store that can't be reached."""


@dataclass(frozen=True, slots=True)
class Cursor:
    """How far a search is.

    Attributes:
        events: how many it has.
        done: individuals that are complete, as its driver last said.
        alive: whether a driver runs it.
    """

    events: int
    done: int
    alive: bool


class Feed:
    """News of a store's searches.

    Args:
        store: the store.
        every: seconds between two looks.
    """

    def __init__(self, store: StoreReader, every: float = _EVERY_S) -> None:
        self._store, self._every = store, every
        self._now: dict[str, Cursor] = {}
        self._looked, self._changed = asyncio.Event(), asyncio.Condition()
        self._watchers = 0
        self._task: asyncio.Task[None] | None = None
        self._closed = False

    @property
    def is_full(self) -> bool:
        """Whether as many watch as may."""
        return self._watchers >= MOST_WATCHERS

    async def watch(self) -> AsyncGenerator[Mapping[str, Cursor]]:
        """Cursors by search id: at first those of all searches, then those that changed, as often as any do."""
        sent: dict[str, Cursor] = {}
        self._watchers += 1
        try:
            if self._task is None or self._task.done():
                self._looked.clear()
                self._task = asyncio.create_task(self._run())
            await self._looked.wait()
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
        """Let all watchers go."""
        self._closed = True
        self._looked.set()
        if self._task is not None:
            self._task.cancel()
        async with self._changed:
            self._changed.notify_all()

    async def _run(self) -> None:
        pause = self._every
        while self._watchers:
            try:
                pause = self._every if await self._look() else min(2 * pause, _SLOWEST_S)
            finally:
                self._looked.set()
            await asyncio.sleep(pause)

    async def _look(self) -> bool:
        try:
            controls = await run_in_threadpool(self._store.controls)
        except StoreError as error:
            log.warning("news can't be read: %s", error)
            return False
        now = {
            key: Cursor(one.events, one.progress.done if one.progress else 0, one.alive)
            for key, one in controls.items()
        }
        if now != self._now:
            self._now = now
            async with self._changed:
                self._changed.notify_all()
        return True
