"""What functions of the package take in several forms: stores, and changes of settings."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

from moevolve.search.config.files import override_lines
from moevolve.search.operations.opening import is_server, refuse_server
from moevolve.search.service.service import LocalService, Service
from moevolve.store.reader import StoreReader
from moevolve.store.repository import Store


def open_store(url: str, *, create: bool = False) -> Store:
    """Open a store; use it as a context manager, or call `close()`.

    Args:
        url: `sqlite:///file.db`, `postgresql://user@host/name`.
        create: make it where there is none.

    Raises:
        StoreError: it can't be opened; the message says why.
        UserError: it is a server's, which answers what only reads or steers.
    """
    refuse_server(url)
    return Store.open(url, create)


def open_reader(url: str) -> StoreReader:
    """Open a store only to read, also while others write; use it like one of `open_store`.

    Args:
        url: as `open_store` has it; a file may be in a folder that can't be written to.

    Raises:
        StoreError: it can't be opened; the message says why.
        UserError: it is a server's, which answers what only reads or steers.
    """
    refuse_server(url)
    return StoreReader.open(url)


def service_of(store: str | StoreReader, writes: bool = False) -> AbstractContextManager[Service]:
    """Who answers requests: a store by URL, which is closed afterwards, or an open one; or a server by its URL.

    Args:
        store: the store, or the server.
        writes: whether a store is opened to be written to.
    """
    if not isinstance(store, str):
        return LocalService(store, keep_open=True)
    if is_server(store):
        from moevolve.search.server.client import RemoteService

        return RemoteService(store)
    return LocalService(open_store(store) if writes else open_reader(store))


def url_of(store: str | Store | None) -> str | None:
    return store if store is None or isinstance(store, str) else store.url


def given_lines(settings: Mapping[str, Any]) -> tuple[str, ...]:
    """Changes of those settings that are given, which None isn't, as `KEY=VALUE` lines."""
    return override_lines({key: value for key, value in settings.items() if value is not None})
