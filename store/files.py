"""The file of a SQLite store, and connections that only read it."""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path
from urllib.parse import quote

from sqlalchemy import URL

from moevolve.store.errors import StoreError

BUSY_SECONDS = 60


def file_of(url: URL) -> Path | None:
    """The file of a SQLite URL; None for other databases and for one in memory."""
    if url.get_backend_name() != "sqlite" or url.database in (None, "", ":memory:"):
        return None
    return Path(str(url.database))


def check_file(path: Path, create: bool) -> None:
    """Refuses a file that can't be a store.

    Raises:
        StoreError: it is a folder, in a missing folder, or missing itself (unless `create`).
    """
    if path.is_dir():
        raise StoreError(f"{path} is a folder, not a store")
    if not path.parent.is_dir():
        raise StoreError(f"folder {path.parent} of the store {path.name} does not exist; create it first")
    if not create and not path.exists():
        raise StoreError(f"there is no store at {path}")


def may_write(path: Path) -> bool:
    """Whether this user may change a file and make others beside it."""
    effective = os.access in os.supports_effective_ids
    return all(os.access(place, os.W_OK, effective_ids=effective) for place in (path, path.parent))


def connect_to_read(path: Path) -> sqlite3.Connection:
    """A connection that refuses to write.

    A store in write-ahead-log mode has the files `-wal` and `-shm` beside it for as long as anybody has it open,
    readers included. Where they can't be made, the file is read as one that doesn't change, unless somebody else made
    them.

    Raises:
        StoreError: somebody has left a log that can't be read from here.
    """
    path = path.resolve()  # beside which SQLite has its log, whatever link leads there
    beside = [path.with_name(path.name + end).exists() for end in ("-wal", "-shm")]
    if may_write(path):
        how = "mode=rw"  # who may only read can't take the log away again
    elif beside == [True, False]:
        raise StoreError(
            f"{path} was left in the middle of a write and its folder can't be written to: copy it, with the files "
            f"{path.name}-* beside it, to a folder of yours"
        )
    else:
        how = "mode=ro" if any(beside) else "mode=ro&immutable=1"
    address = f"file:{quote(str(path))}?{how}"
    connection = sqlite3.connect(address, uri=True, timeout=BUSY_SECONDS, check_same_thread=False)
    connection.execute("PRAGMA query_only=ON")
    return connection
