"""The file of a SQLite store, and read-only connections to it."""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path
from urllib.parse import quote

from sqlalchemy import URL

from moevolve.store.errors import StoreError

BUSY_SECONDS = 60


def file_of(url: URL) -> Path | None:
    """The file of a SQLite URL; None for other databases and for databases in memory."""
    if url.get_backend_name() != "sqlite" or url.database in (None, "", ":memory:"):
        return None
    return Path(str(url.database))


def check_file(path: Path, create: bool) -> None:
    """Refuses a path that can't be a store.

    Raises:
        StoreError: The path is a folder, its folder is missing, or the file is missing and `create` is false.
    """
    if path.is_dir():
        raise StoreError(f"{path} is a folder, not a store")
    if not path.parent.is_dir():
        raise StoreError(f"folder {path.parent} of the store {path.name} does not exist; create it first")
    if not create and not path.exists():
        raise StoreError(f"there is no store at {path}")


def may_write(path: Path) -> bool:
    """Whether this user may change a file and create others in its folder."""
    effective = os.access in os.supports_effective_ids
    return all(os.access(place, os.W_OK, effective_ids=effective) for place in (path, path.parent))


def connect_to_read(path: Path) -> sqlite3.Connection:
    """Opens a connection that refuses to write.

    While any process has a store in write-ahead-log mode open, readers included, the files `-wal` and `-shm` exist in
    its folder. If they are missing and this user can't create them, the store is opened as a file that doesn't change.

    Raises:
        StoreError: A write-ahead log was left behind that this user can't read.
    """
    path = path.resolve()  # SQLite keeps its log next to the file itself, not next to a link to it
    wal, shm = (path.with_name(path.name + end).exists() for end in ("-wal", "-shm"))
    if may_write(path):
        how = "mode=rw"  # a read-only connection could not remove the log when it closes
    elif wal and not shm:
        raise StoreError(
            f"{path} was left in the middle of a write and its folder can't be written to: copy it, with the files "
            f"{path.name}-* beside it, to a folder of yours"
        )
    else:
        how = "mode=ro" if wal or shm else "mode=ro&immutable=1"
    address = f"file:{quote(str(path))}?{how}"
    connection = sqlite3.connect(address, uri=True, timeout=BUSY_SECONDS, check_same_thread=False)
    connection.execute("PRAGMA query_only=ON")
    return connection
