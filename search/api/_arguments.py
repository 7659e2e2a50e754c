"""What functions of the package take in several forms: stores, and changes of settings."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moevolve.search.server.client import Client
    from moevolve.store.reader import StoreReader
    from moevolve.store.repository import Store

Overrides = Mapping[str, Any] | Sequence[str]
"""Settings by dotted path, or `KEY=VALUE` lines as the command line has them."""


def open_store(url: str, *, create: bool = False) -> Store:
    """Open a store; use it as a context manager, or call `close()`.

    Args:
        url: `sqlite:///file.db`, `postgresql://user@host/name`.
        create: make it where there is none.

    Raises:
        StoreError: it can't be opened; the message says why.
        UserError: it is a server's, which answers what only reads or steers.
    """
    from moevolve.store.repository import Store

    _refuse_server(url)
    return Store.open(url, create)


def open_reader(url: str) -> StoreReader:
    """Open a store only to read, also while others write; use it like one of `open_store`.

    Args:
        url: as `open_store` has it; a file may be in a folder that can't be written to.

    Raises:
        StoreError: it can't be opened; the message says why.
        UserError: it is a server's, which answers what only reads or steers.
    """
    from moevolve.store.reader import StoreReader

    _refuse_server(url)
    return StoreReader.open(url)


def store_of(store: str | Store, create: bool = False) -> AbstractContextManager[Store]:
    """A store by URL, closed afterwards; or an open one, left open.

    Raises:
        StoreError: it can't be opened, or was opened only to read.
    """
    from moevolve.store.errors import StoreError
    from moevolve.store.repository import Store
    from moevolve.store.session import without_password

    if isinstance(store, str):
        return open_store(store, create=create)
    if not isinstance(store, Store):  # in a notebook no type checker says so
        where = without_password(store.url)
        raise StoreError(f"{where} was opened for reading only, and this writes to it: use moevolve.open_store")
    return nullcontext(store)


def reader_of(store: str | StoreReader) -> AbstractContextManager[StoreReader]:
    """The same, only to read."""
    return open_reader(store) if isinstance(store, str) else nullcontext(store)


def asked_of(store: str | StoreReader) -> AbstractContextManager[StoreReader | Client]:
    """Who answers what only reads: a store as `reader_of` has it, or a server by its URL."""
    return _client(store) if isinstance(store, str) and is_server(store) else reader_of(store)


def steered_by(store: str | Store) -> AbstractContextManager[Store | Client]:
    """Who passes on what is asked of a search: a store as `store_of` has it, or a server by its URL."""
    return _client(store) if isinstance(store, str) and is_server(store) else store_of(store)


def is_server(url: str) -> bool:
    """Whether a store's URL is that of a server.

    Raises:
        UserError: it is HOST:PORT, which is neither.
    """
    if re.fullmatch(r"(\[[\da-fA-F:]+\]|[\w.-]+):\d+/?", url):
        from moevolve.evaluators.errors import UserError

        raise UserError(f"{url} is no URL: a server's is http://{url}")
    return url.startswith(("http://", "https://"))


def _client(url: str) -> Client:
    from moevolve.search.server.client import Client

    return Client(url)


def _refuse_server(url: str) -> None:
    if is_server(url):
        from moevolve.evaluators.errors import UserError

        raise UserError(f"{url} is a server: this needs the store itself, and the model; do it where they are")


def url_of(store: str | Store | None) -> str | None:
    return store if store is None or isinstance(store, str) else store.url


def override_lines(overrides: Overrides) -> tuple[str, ...]:
    """Changes of settings as `KEY=VALUE` lines."""
    from moevolve.search.config.files import as_override

    if isinstance(overrides, Mapping):
        return tuple(as_override(key, value) for key, value in overrides.items())
    return tuple(overrides)


def given_lines(settings: Mapping[str, Any]) -> tuple[str, ...]:
    """The same of those settings that are given, which None isn't."""
    return override_lines({key: value for key, value in settings.items() if value is not None})
