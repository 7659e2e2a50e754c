"""Changing the desired state of a search through its store."""

from __future__ import annotations

from moevolve.evaluators.errors import UserError
from moevolve.search.running.lease_heartbeat import brief_lease
from moevolve.store.events import asker
from moevolve.store.records import Control, DesiredState
from moevolve.store.repository import Store


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


def unpause(store: Store, search: str) -> bool:
    """Let the driver of a paused search go on; False if the search isn't paused or has no driver."""
    search_id = store.search(search).id
    control = store.control(search_id)
    if not control.alive or control.desired_state != "paused":
        return False
    store.ask(search_id, "running")
    return True
