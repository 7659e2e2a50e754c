"""Opening stores, and choosing between a store and a server."""

from __future__ import annotations

from contextlib import AbstractContextManager

from moevolve.search.operations.opening import is_server, refuse_server
from moevolve.search.service.service import LocalService, Service
from moevolve.store.reader import StoreReader
from moevolve.store.repository import Store


def open_store(url: str, *, create: bool = False) -> Store:
    """Open a store; use it as a context manager, or call `close()`.

    Args:
        url: SQLAlchemy URL: `sqlite:///file.db`, `postgresql://user@host/name`.
        create: Make the store if it doesn't exist.

    Raises:
        StoreError: the store can't be opened; the message says why.
        UserError: the URL is a server's.
    """
    refuse_server(url)
    return Store.open(url, create)


def open_reader(url: str) -> StoreReader:
    """Open a store only to read, also while others write to it; use it as a context manager, or call `close()`.

    The file of a SQLite store may be in a folder that can't be written to.

    Raises:
        StoreError: the store can't be opened; the message says why.
        UserError: the URL is a server's.
    """
    refuse_server(url)
    return StoreReader.open(url)


def service_of(store: str | StoreReader, writes: bool = False) -> AbstractContextManager[Service]:
    """Make the service that answers requests: an open store's, which stays open, or that of a store's or server's URL.

    Args:
        store: The open store, or the URL.
        writes: Open a store for writing.
    """
    if not isinstance(store, str):
        return LocalService(store, keep_open=True)
    if is_server(store):
        from moevolve.search.server.client import RemoteService

        return RemoteService(store)
    return LocalService(open_store(store) if writes else open_reader(store))
