"""Asking a search's driver for something, from wherever its store is reached."""

from __future__ import annotations

from moevolve.evaluators.errors import UserError
from moevolve.search.running.driving import held, is_gone
from moevolve.store.records import Control, Wanted
from moevolve.store.repository import Store


def steer(store: Store, search: str, wanted: Wanted) -> Control:
    """Ask the driver of a search to pause, stop or cancel it. It does so within seconds.

    A search that no driver runs can be cancelled, too.

    Args:
        store: where it is.
        search: name or id.
        wanted: what is to become of it.

    Raises:
        StoreError: no such search, or no driver runs it.
        UserError: it has come to its end.
    """
    record = store.search(search)
    if wanted != "cancelled" or store.control(record.id, is_gone).alive:
        return store.ask(record.id, wanted, dead=is_gone)
    if record.status in ("finished", "cancelled"):
        raise UserError(f"search {record.name} is {record.status} already")
    with held(store, record.id) as lease:
        store.set_status(lease, "cancelled", "asked for from outside")
    return store.control(record.id)


def scale(store: Store, search: str, workers: int | None, priority: int | None) -> Control:
    """Ask the driver of a search to have so many workers from now on, or another priority; no individual changes.

    Args:
        store: where it is.
        search: name or id.
        workers: how many; None leaves that as it is.
        priority: among searches that share a cluster; None likewise.

    Raises:
        StoreError: no such search, or no driver runs it.
        UserError: too few workers, or nothing is asked.
    """
    if workers is None and priority is None:
        raise UserError("say how many workers the search is to have, or which --priority")
    if workers is not None and workers < 1:
        raise UserError(f"a search needs one worker at least, not {workers}; to have none for a while, pause it")
    return store.ask(store.search(search).id, workers=workers, priority=priority, dead=is_gone)


def unpaused(store: Store, search: str) -> bool:
    """Let a paused search go on where it runs; whether it is one."""
    search_id = store.search(search).id
    control = store.control(search_id, is_gone)
    if not control.alive or control.wanted != "paused":
        return False
    store.ask(search_id, "running")
    return True
