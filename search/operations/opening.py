"""Opening stores that are given as a URL or as an open store."""

from __future__ import annotations

import re
from contextlib import AbstractContextManager, nullcontext

from moevolve.evaluators.errors import UserError
from moevolve.store.errors import StoreError
from moevolve.store.reader import StoreReader
from moevolve.store.repository import Store
from moevolve.store.session import without_password


def is_server(url: str) -> bool:
    """Whether a store's URL is that of a server.

    Raises:
        UserError: it is HOST:PORT, which is neither.
    """
    if re.fullmatch(r"(\[[\da-fA-F:]+\]|[\w.-]+):\d+/?", url):
        raise UserError(f"{url} is no URL: a server's is http://{url}")
    return url.startswith(("http://", "https://"))


def refuse_server(url: str) -> None:
    """Raises UserError if a store's URL is that of a server."""
    if is_server(url):
        raise UserError(f"{url} is a server: this needs the store itself, and the model; do it where they are")


def opened_reader(store: str | StoreReader) -> AbstractContextManager[StoreReader]:
    """A store by URL, closed afterwards; or an open one, left open.

    Raises:
        StoreError: it can't be opened.
        UserError: it is a server's.
    """
    if not isinstance(store, str):
        return nullcontext(store)
    refuse_server(store)
    return StoreReader.open(store)


def opened_store(store: str | Store, create: bool = False) -> AbstractContextManager[Store]:
    """A store by URL, closed afterwards; or an open one, left open.

    Raises:
        StoreError: it can't be opened, or was opened for reading only.
        UserError: it is a server's.
    """
    if isinstance(store, str):
        refuse_server(store)
        return Store.open(store, create)
    return nullcontext(writable(store))


def writable(store: StoreReader) -> Store:
    """An open store, to write to.

    Raises:
        StoreError: it was opened for reading only.
    """
    if not isinstance(store, Store):  # in a notebook no type checker says so
        where = without_password(store.url)
        raise StoreError(f"{where} was opened for reading only, and this writes to it: use moevolve.open_store")
    return store
