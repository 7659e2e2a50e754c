"""Steering searches that run elsewhere, through the store that they share."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moevolve._arguments import store_of

if TYPE_CHECKING:
    from moevolve.store.records import Control
    from moevolve.store.repository import Store


def pause(search: str, *, store: str | Store) -> Control:
    """Ask a running search to give its workers back and wait; `resume` lets it go on where it runs.

    What its workers were evaluating is evaluated again; no individual changes by that.

    Raises:
        StoreError: no such store or search, or no process runs it.
    """
    from moevolve.search.service.steer import steer

    with store_of(store) as opened:
        return steer(opened, search, "paused")


def stop(search: str, *, store: str | Store) -> Control:
    """Ask a running search to end, as Ctrl-C does at its terminal; `resume` continues it.

    Raises:
        StoreError: no such store or search, or no process runs it.
    """
    from moevolve.search.service.steer import steer

    with store_of(store) as opened:
        return steer(opened, search, "stopped")


def cancel(search: str, *, store: str | Store) -> Control:
    """End a search for good, whether it is running or not; what it evaluated stays in the store.

    Raises:
        StoreError: no such store or search.
        UserError: it is finished or cancelled already.
    """
    from moevolve.search.service.steer import steer

    with store_of(store) as opened:
        return steer(opened, search, "cancelled")


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

    with store_of(store) as opened:
        return service.scale(opened, search, workers, priority)
