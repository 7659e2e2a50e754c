"""What functions of the package take in several forms: stores, and changes of settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moevolve.search.server.client import Client
    from moevolve.store.repository import Store

Overrides = Mapping[str, Any] | Sequence[str]
"""Settings by dotted path, or `KEY=VALUE` lines as the command line has them."""


def open_store(url: str, *, create: bool = False, read_only: bool = False) -> Store:
    """Open a store; use it as a context manager, or call `close()`.

    Args:
        url: `sqlite:///file.db`, `postgresql://user@host/name`.
        create: make it where there is none.
        read_only: only to read, also while others write; of a folder, too, that can't be written to.

    Raises:
        StoreError: it can't be opened; the message says why.
        UserError: it is a server's, which answers what only reads or steers.
    """
    from moevolve.store.repository import Store

    if is_server(url):
        from moevolve.evaluators.errors import UserError

        raise UserError(f"{url} is a server: this needs the store itself, and the model; do it where they are")
    return Store.open(url, create, read_only)


def store_of(store: str | Store, create: bool = False) -> AbstractContextManager[Store]:
    """A store by URL, closed afterwards; or an open one, left open."""
    return open_store(store, create=create) if isinstance(store, str) else nullcontext(store)


def read_store(store: str | Store) -> AbstractContextManager[Store]:
    """The same, only to read."""
    return open_store(store, read_only=True) if isinstance(store, str) else nullcontext(store)


def asked_of(store: str | Store, read_only: bool = True) -> AbstractContextManager[Store | Client]:
    """Who answers what only reads or steers: a store, as `read_store` or `store_of` has it, or a server by its URL."""
    if isinstance(store, str) and is_server(store):
        from moevolve.search.server.client import Client

        return Client(store)
    return read_store(store) if read_only else store_of(store)


def is_server(url: str) -> bool:
    """Whether a store's URL is that of a server."""
    return url.startswith(("http://", "https://"))


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
