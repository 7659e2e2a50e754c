"""Changing the desired state of a search through its store."""

from __future__ import annotations

from moevolve.evaluators.errors import UserError
from moevolve.search.requests.running import CancelRequest, PauseRequest, ScaleRequest, StopRequest
from moevolve.search.running.lease_heartbeat import brief_lease
from moevolve.store.events import asker
from moevolve.store.records import Control, DesiredState
from moevolve.store.repository import Store


def pause(store: Store, request: PauseRequest) -> Control:
    """See `PauseRequest`."""
    return steer(store, request.search, "paused")


def stop(store: Store, request: StopRequest) -> Control:
    """See `StopRequest`."""
    return steer(store, request.search, "stopped")


def cancel(store: Store, request: CancelRequest) -> Control:
    """See `CancelRequest`."""
    return steer(store, request.search, "cancelled")


def steer(store: Store, search: str, desired_state: DesiredState) -> Control:
    """Ask the driver of a search to pause, stop or cancel it, which it does within seconds.

    A search that no driver runs can also be cancelled.

    Raises:
        StoreError: There is no such search, or no driver runs it.
        UserError: The search is finished or cancelled.
    """
    record = store.search(search)
    if desired_state != "cancelled" or store.control(record.id).alive:
        return store.ask(record.id, desired_state)
    if record.status in ("finished", "cancelled"):
        raise UserError(f"search {record.name} is {record.status} already")
    with brief_lease(store, record.id) as lease:
        store.set_status(lease, "cancelled", f"asked for by {asker()}")
    return store.control(record.id)


def scale(store: Store, request: ScaleRequest) -> Control:
    """See `ScaleRequest`."""
    if request.workers is None and request.priority is None:
        raise UserError("say how many workers the search is to have, or which --priority")
    return store.ask(store.search(request.search).id, workers=request.workers, priority=request.priority)


def unpause(store: Store, search: str) -> bool:
    """Let the driver of a paused search go on; False if the search isn't paused or has no driver."""
    search_id = store.search(search).id
    control = store.control(search_id)
    if not control.alive or control.desired_state != "paused":
        return False
    store.ask(search_id, "running")
    return True
