"""Opening stores from a URL or an open store."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from moevolve.store.errors import StoreError
from moevolve.store.reader import StoreReader
from moevolve.store.repository import Store
from moevolve.store.session import without_password


def opened_reader(store: str | StoreReader) -> AbstractContextManager[StoreReader]:
    """Open a store to read; the context closes one given by URL, and leaves an open one open.

    Raises:
        StoreError: the store can't be opened.
    """
    return StoreReader.open(store) if isinstance(store, str) else nullcontext(store)


def opened_store(store: str | Store, create: bool = False) -> AbstractContextManager[Store]:
    """Open a store to write; the context closes one given by URL, and leaves an open one open.

    Raises:
        StoreError: the store can't be opened, or was opened for reading only.
    """
    if isinstance(store, str):
        return Store.open(store, create)
    if not isinstance(store, Store):  # type checkers see it, notebooks don't
        where = without_password(store.url)
        raise StoreError(f"{where} was opened for reading only, and this writes to it: use moevolve.open_store")
    return nullcontext(store)
