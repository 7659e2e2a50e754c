"""Hold the lease of a search: renew it in the background, and read the desired state with it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self

from moevolve.store.errors import LeaseLostError, StoreError
from moevolve.store.leases import is_on_another_machine, this_process
from moevolve.store.records import Control, Lease, Progress
from moevolve.store.repository import Store

log = logging.getLogger(__name__)

# Interval between renewals of a lease: as long as a user waits for a pause or a stop to begin.
_BEAT_S = 1.0
# Time without a renewal after which another driver may take a search over: longer than databases and networks take to
# restart, and as long as anybody waits for a search whose driver has died on another machine.
LEASE_S = 30.0
# Longest wait for another process that writes to the SQLite file, such as `db copy` of a large one; meanwhile nobody
# can take the lease.
_LOCKED_S = 600.0
# Longest wait for a SQLite file to release the lease, which otherwise expires: users who press Ctrl-C wait for it.
_LEAVING_S = 5.0


class LeaseHeartbeat:
    """A search's lease within a `with` block, renewed every second.

    Within the block the store waits for a database that restarts as long as the lease lasts, and for a SQLite file
    that another process writes to up to ten minutes.

    Args:
        store: Store of the search.
        search_id: Id of the search.
        seconds: Duration of the lease if it isn't renewed.

    Attributes:
        lease: The lease.
        stage, progress: State of the driver, to be published with the next renewal.

    Raises:
        LeaseHeldError: On entry, if another driver runs the search.
        StoreError: On entry, if a driver on another machine writes to the same SQLite file.
    """

    def __init__(self, store: Store, search_id: str, seconds: float) -> None:
        self._store, self._search_id, self._seconds = store, search_id, seconds
        self._ended = threading.Event()
        self._lost: StoreError | None = None
        self.stage: str | None = None
        self.progress: Progress | None = None
        self._thread = threading.Thread(target=self._beat, name=f"lease of {search_id}", daemon=True)
        self.lease: Lease

    def __enter__(self) -> Self:
        self.lease = _acquire(self._store, self._search_id, self._seconds)
        # From here on every write is fenced, so writes can be repeated safely after a lost connection.
        self._patience_before = self._store.retry_timeout_s
        self._store.retry_timeout_s = _LOCKED_S if self._store.is_file else self._seconds
        self._control = Control(self.lease.owner, self.lease.epoch, True, "running", None)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        # Also for a renewal in progress.
        self._store.retry_timeout_s = _LEAVING_S if self._store.is_file else self._seconds
        try:
            self._thread.join()
            if self._lost is None:
                self._store.renew(self.lease, self._seconds, self.stage, self.progress)
            self._store.release(self.lease)
        except StoreError as lost:
            log.warning("the lease of search %s was not given back, and will run out: %s", self._search_id, lost)
        finally:
            self._store.retry_timeout_s = self._patience_before

    @property
    def control(self) -> Control:
        """The search's control (desired state, workers) as last read.

        Raises:
            LeaseLostError: Another driver has taken the search over.
            StoreError: The store was unavailable for longer than the lease lasts.
        """
        if self._lost is not None:
            raise self._lost
        return self._control

    def _beat(self) -> None:
        renewed = time.monotonic()
        while not self._ended.wait(min(_BEAT_S, self._seconds / 3)):
            try:
                self._control = self._store.renew(self.lease, self._seconds, self.stage, self.progress)
                renewed = time.monotonic()
            except LeaseLostError as error:
                self._lost = error
                return
            except StoreError as error:
                # A restarting database returns; another driver can take the search only after the lease has expired.
                if time.monotonic() - renewed > self._seconds:
                    self._lost = error
                    return


@contextmanager
def brief_lease(store: Store, search_id: str) -> Iterator[Lease]:
    """A search's lease for a few quick writes; LeaseHeldError if a driver runs the search."""
    lease = _acquire(store, search_id, LEASE_S)
    try:
        yield lease
    finally:
        store.release(lease)


def unpause(store: Store, search: str) -> bool:
    """Let the driver of a paused search go on; False if the search isn't paused or has no driver."""
    search_id = store.search(search).id
    control = store.control(search_id)
    if not control.alive or control.desired_state != "paused":
        return False
    store.ask(search_id, "running")
    return True


def _acquire(store: Store, search_id: str, seconds: float) -> Lease:
    """Acquire a search's lease, unless another machine writes to the store's SQLite file."""
    for other, control in store.running().items() if store.is_file else ():
        if is_on_another_machine(str(control.owner)):
            raise StoreError(
                f"search {store.search(other).name} of this store is being run by {control.owner}, and several "
                "machines can't write to a SQLite file: use PostgreSQL (--store postgresql://USER@HOST/NAME)"
            )
    return store.acquire(search_id, this_process(), seconds)
