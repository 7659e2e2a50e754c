"""Asking a search's driver for something, from wherever its store is reached."""

from __future__ import annotations

from moevolve.evaluators.errors import UserError
from moevolve.search.requests.running import CancelRequest, PauseRequest, ScaleRequest, StopRequest
from moevolve.search.running.lease_heartbeat import held
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
    """Ask the driver of a search to pause, stop or cancel it. It does so within seconds.

    A search that no driver runs can be cancelled, too.

    Args:
        store: where it is.
        search: name or id.
        desired_state: what is to become of it.

    Raises:
        StoreError: no such search, or no driver runs it.
        UserError: it has come to its end.
    """
    record = store.search(search)
    if desired_state != "cancelled" or store.control(record.id).alive:
        return store.ask(record.id, desired_state)
    if record.status in ("finished", "cancelled"):
        raise UserError(f"search {record.name} is {record.status} already")
    with held(store, record.id) as lease:
        store.set_status(lease, "cancelled", "asked for from outside")
    return store.control(record.id)


def scale(store: Store, request: ScaleRequest) -> Control:
    """See `ScaleRequest`."""
    if request.workers is None and request.priority is None:
        raise UserError("say how many workers the search is to have, or which --priority")
    return store.ask(store.search(request.search).id, workers=request.workers, priority=request.priority)


def unpaused(store: Store, search: str) -> bool:
    """Let a paused search go on where it runs; whether it is one."""
    search_id = store.search(search).id
    control = store.control(search_id)
    if not control.alive or control.desired_state != "paused":
        return False
    store.ask(search_id, "running")
    return True
