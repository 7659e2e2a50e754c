"""Steering searches that run elsewhere, through the store that they share."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moevolve._arguments import steered_by

if TYPE_CHECKING:
    from moevolve.store.records import Control, Wanted
    from moevolve.store.repository import Store


def pause(search: str, *, store: str | Store) -> Control:
    """Ask a running search to give its workers back and wait; `resume` lets it go on where it runs.

    What its workers were evaluating is evaluated again; no individual changes by that.

    Raises:
        StoreError: no such store or search, or no process runs it.
    """
    return _asked(search, store, "paused")


def stop(search: str, *, store: str | Store) -> Control:
    """Ask a running search to end, as Ctrl-C does at its terminal; `resume` continues it.

    Raises:
        StoreError: no such store or search, or no process runs it.
    """
    return _asked(search, store, "stopped")


def cancel(search: str, *, store: str | Store) -> Control:
    """End a search for good, whether it is running or not; what it evaluated stays in the store.

    Raises:
        StoreError: no such store or search.
        UserError: it is finished or cancelled already.
    """
    return _asked(search, store, "cancelled")


def scale(search: str, workers: int | None = None, *, store: str | Store, priority: int | None = None) -> Control:
    """Ask a running search to have so many workers from now on, or another priority; no individual changes by that.

    Args:
        search: name or id.
        workers: how many, whatever its configuration says; None leaves that as it is.
        store: where it is.
        priority: among searches that share a cluster and a store; None leaves it as it is.

    Raises:
        StoreError: no such store or search, or no process runs it.
        UserError: `workers` is less than 1, or nothing is asked.
    """
    from moevolve.search.service import steer as service
    from moevolve.store.repository import Store

    with steered_by(store) as opened:
        if isinstance(opened, Store):
            return service.scale(opened, search, workers, priority)
        return opened.scale(search, workers, priority)


def _asked(search: str, store: str | Store, wanted: Wanted) -> Control:
    from moevolve.search.service.steer import steer
    from moevolve.store.repository import Store

    with steered_by(store) as opened:
        return steer(opened, search, wanted) if isinstance(opened, Store) else opened.steer(search, wanted)
