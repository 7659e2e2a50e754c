"""Opening stores from a URL or an open store."""

from __future__ import annotations

import re
from contextlib import AbstractContextManager, nullcontext

from moevolve.evaluators.errors import UserError
from moevolve.store.errors import StoreError
from moevolve.store.reader import StoreReader
from moevolve.store.repository import Store
from moevolve.store.session import without_password


def is_server(url: str) -> bool:
    """Tell whether a URL is a server's.

    Raises:
        UserError: it is HOST:PORT, which is neither a server's nor a store's URL.
    """
    if re.fullmatch(r"(\[[\da-fA-F:]+\]|[\w.-]+):\d+/?", url):
        raise UserError(f"{url} is no URL: a server's is http://{url}")
    return url.startswith(("http://", "https://"))


def refuse_server(url: str) -> None:
    """Raise UserError if a URL is a server's."""
    if is_server(url):
        raise UserError(f"{url} is a server: this needs the store itself, and the model; do it where they are")


def opened_reader(store: str | StoreReader) -> AbstractContextManager[StoreReader]:
    """Open a store to read; the context closes one given by URL, and leaves an open one open.

    Raises:
        StoreError: the store can't be opened.
        UserError: the URL is a server's.
    """
    if not isinstance(store, str):
        return nullcontext(store)
    refuse_server(store)
    return StoreReader.open(store)


def opened_store(store: str | Store, create: bool = False) -> AbstractContextManager[Store]:
    """Open a store to write; the context closes one given by URL, and leaves an open one open.

    Raises:
        StoreError: the store can't be opened, or was opened for reading only.
        UserError: the URL is a server's.
    """
    if isinstance(store, str):
        refuse_server(store)
        return Store.open(store, create)
    if not isinstance(store, Store):  # type checkers see it, notebooks don't
        where = without_password(store.url)
        raise StoreError(f"{where} was opened for reading only, and this writes to it: use moevolve.open_store")
    return nullcontext(store)
