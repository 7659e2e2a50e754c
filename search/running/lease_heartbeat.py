"""Holding a search while it runs: the lease is renewed in the background, and what is asked of the driver is heard."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self

from moevolve.store.errors import LeaseLostError, StoreError
from moevolve.store.owners import is_on_another_machine, this_process
from moevolve.store.records import Control, Lease, Progress, ResourceRequest
from moevolve.store.repository import Store

log = logging.getLogger(__name__)

_BEAT_S = 1.0
"""How often a lease is renewed, and looked whether something is asked."""
_BRIEFLY_S = 30.0
"""How long a lease for a few writes lasts if its owner dies over them."""
_LOCKED_S = 600.0
"""How long a driver waits for another process that writes to its SQLite file, where nobody can take its lease then."""
_LEAVING_S = 5.0
"""How long it waits for such a file to give its lease back, which runs out by itself otherwise."""


class LeaseHeartbeat:
    """A search's lease, for the length of a `with` block.

    Args:
        store: where the search is.
        search_id: of the search.
        seconds: that the lease lasts when it isn't renewed.
        priority: of the search from now on.
        claim: what it could use of a cluster; asked with every renewal.

    Meanwhile the store waits for a database that restarts, as long as the lease lasts; for a SQLite file that another
    process writes to ten minutes, for until it ends nobody else can have the lease either.

    Raises:
        LeaseHeldError: on entering, if another driver runs the search.
        StoreError: on entering, if a driver on another machine writes to the same SQLite file.
    """

    def __init__(
        self,
        store: Store,
        search_id: str,
        seconds: float,
        priority: int = 0,
        claim: Callable[[], ResourceRequest | None] = lambda: None,
    ) -> None:
        self._store, self._search_id, self._seconds = store, search_id, seconds
        self._priority, self._claim = priority, claim
        self._running: dict[str, Control] | None = None
        self._ended = threading.Event()
        self._lost: StoreError | None = None
        self._stage: str | None = None
        self._progress: Progress | None = None
        self._thread = threading.Thread(target=self._beat, name=f"lease of {search_id}", daemon=True)
        self.lease: Lease

    def __enter__(self) -> Self:
        self.lease = _acquire(self._store, self._search_id, self._seconds, self._priority)
        # From here on every write is fenced, so none does harm that is tried again after a lost connection.
        self._patience_before = self._store.retry_timeout_s
        self._store.retry_timeout_s = _LOCKED_S if self._store.is_file else self._seconds
        self._control = Control(self.lease.owner, self.lease.epoch, True, "running", None, self._priority)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._store.retry_timeout_s = _LEAVING_S if self._store.is_file else self._seconds  # the beat's wait, too
        try:
            self._thread.join()
            if self._lost is None:
                self._store.renew(self.lease, self._seconds, self._stage, self._progress)
            self._store.release(self.lease)
        except StoreError as lost:
            log.warning("the lease of search %s was not given back, and will run out: %s", self._search_id, lost)
        finally:
            self._store.retry_timeout_s = self._patience_before

    @property
    def control(self) -> Control:
        """What is asked of this driver.

        Raises:
            LeaseLostError: the search is another one's.
            StoreError: the store could not be reached for as long as the lease lasts.
        """
        if self._lost is not None:
            raise self._lost
        return self._control

    @property
    def running_searches(self) -> dict[str, Control] | None:
        """The searches that are being run, this one among them; None as long as it has joined no cluster."""
        return self._running

    def tell_stage(self, stage: str) -> None:
        """Let everybody who reaches the store know what this driver does, with the next renewal."""
        self._stage = stage

    def tell_progress(self, progress: Progress) -> None:
        """Let everybody who reaches the store know where the search stands, with the next renewal."""
        self._progress = progress

    def _beat(self) -> None:
        renewed = time.monotonic()
        while not self._ended.wait(min(_BEAT_S, self._seconds / 3)):
            try:
                claim = self._claim()
                self._control = self._store.renew(self.lease, self._seconds, self._stage, self._progress, claim)
                renewed = time.monotonic()
                if claim is not None:
                    self._running = self._store.running()
            except LeaseLostError as error:
                self._lost = error
                return
            except StoreError as error:
                # A database that restarts comes back; only after the lease ran out may somebody else have the search.
                if time.monotonic() - renewed > self._seconds:
                    self._lost = error
                    return


@contextmanager
def held(store: Store, search_id: str) -> Iterator[Lease]:
    """A search's lease for a few writes that take no time.

    Raises:
        LeaseHeldError: a driver runs it.
    """
    lease = _acquire(store, search_id, _BRIEFLY_S)
    try:
        yield lease
    finally:
        store.release(lease)


def _acquire(store: Store, search_id: str, seconds: float, priority: int | None = None) -> Lease:
    """A search's lease for this process, unless the store is a file that another machine writes to."""
    for other, control in store.running().items() if store.is_file else ():
        if is_on_another_machine(str(control.owner)):
            raise StoreError(
                f"search {store.search(other).name} of this store is being run by {control.owner}, and several "
                "machines can't write to a SQLite file: use PostgreSQL (--store postgresql://USER@HOST/NAME)"
            )
    return store.acquire(search_id, this_process(), seconds, priority)
