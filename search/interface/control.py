"""Control of a running search: who runs it, following it, and asking it to be paused, stopped, cancelled or scaled."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, ClassVar

from moevolve.evaluators.errors import UserError
from moevolve.evaluators.records import short_repr
from moevolve.search.interface.opening import opened_reader
from moevolve.search.interface.parameters import SearchRef
from moevolve.search.interface.request import Request, about, record
from moevolve.search.running.lease_heartbeat import brief_lease
from moevolve.store.events import asker
from moevolve.store.reader import StoreReader
from moevolve.store.records import Control, DesiredState, SearchRecord
from moevolve.store.repository import Store


@dataclass(frozen=True, slots=True)
class SearchState:
    """A search at one moment, and its driver."""

    __repr__ = short_repr

    search: SearchRecord
    control: Control

    @property
    def is_orphaned(self) -> bool:
        """Whether the driver is gone without having stored a final status."""
        return self.search.is_orphaned(self.control.alive)

    @property
    def ended(self) -> bool:
        """Whether nothing more happens unless someone resumes the search."""
        return self.is_orphaned or self.search.status not in ("created", "running", "paused")


# Seconds between two looks at a search; its driver reports as often.
_POLL_S = 1.0


@record
class WatchRequest(Request):
    """Follow a search until it ends: its state now, then whenever it has changed. The search isn't touched.

    Raises:
        StoreError: the store or search doesn't exist.
    """

    opens = True
    search: SearchRef

    def answer(self, store: str | StoreReader) -> Iterator[SearchState]:
        last = None
        with opened_reader(store) as opened:
            while last is None or not last.ended:
                search = opened.search(self.search)
                found = SearchState(search, opened.control(search.id))
                if found != last:
                    yield found
                last = found
                if not last.ended:
                    time.sleep(_POLL_S)


@record
class SteerRequest(Request):
    """Change the desired state of a search, which its driver carries out within seconds."""

    writes = True
    desired_state: ClassVar[DesiredState]
    search: SearchRef

    def answer(self, store: Store) -> Control:
        record = store.search(self.search)
        if self.desired_state != "cancelled" or store.control(record.id).alive:
            return store.ask(record.id, self.desired_state)
        if record.status in ("finished", "cancelled"):
            raise UserError(f"search {record.name} is {record.status} already")
        with brief_lease(store, record.id) as lease:
            store.set_status(lease, "cancelled", f"asked for by {asker()}")
        return store.control(record.id)


@record
class PauseRequest(SteerRequest):
    """Ask a running search to release its workers and wait; `resume` lets it go on where it runs.

    Evaluations in progress are made again later; candidates stay the same.

    Raises:
        StoreError: the store or search doesn't exist, or no process runs it.
    """

    route = "/searches/{search}/pause"
    desired_state = "paused"


@record
class StopRequest(SteerRequest):
    """Ask a running search to end, as Ctrl-C does at its terminal; `resume` continues it.

    Raises:
        StoreError: the store or search doesn't exist, or no process runs it.
    """

    route = "/searches/{search}/stop"
    desired_state = "stopped"


@record
class CancelRequest(SteerRequest):
    """End a search for good, whether it is running or not; what it evaluated stays in the store.

    Raises:
        StoreError: the store or search doesn't exist.
        UserError: the search is finished or cancelled already.
    """

    route = "/searches/{search}/cancel"
    desired_state = "cancelled"


@record
class ScaleRequest(Request):
    """Change the number of workers of a running search; its candidates stay the same.

    Raises:
        StoreError: the store or search doesn't exist, or no process runs it.
    """

    route = "/searches/{search}/scale"
    writes = True
    search: SearchRef
    workers: Annotated[int, about("Number of workers from now on.", ge=1, le=100_000)]

    def answer(self, store: Store) -> Control:
        return store.ask(store.search(self.search).id, workers=self.workers)
