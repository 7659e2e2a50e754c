"""Connections and transactions: what differs between SQLite and PostgreSQL is in this file."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from sqlalchemy import URL, Connection, Engine, Table, create_engine, event, insert, make_url
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.exc import ArgumentError, SQLAlchemyError
from sqlalchemy.pool import ConnectionPoolEntry, StaticPool

from moevolve.store.errors import StoreError

BUSY_SECONDS = 60
CHUNK = 500
"""Values per IN list: far below every backend's limit on the variables of one statement."""

_PRAGMAS = (
    "foreign_keys=ON",
    # In WAL mode NORMAL survives a killed process whole; a power cut may cost the last commits, never consistency.
    "synchronous=NORMAL",
    f"busy_timeout={BUSY_SECONDS * 1000}",
    # Pages of 4 KiB. Hashes land all over their indexes, so copying the log back is dear and rarer is better; the cache
    # (64 MiB) holds what it touches.
    "wal_autocheckpoint=16384",
    "cache_size=-65536",
)

# Behind the user's name, and among the settings that drivers take.
_SECRETS = (
    re.compile(r"(://[^:/@]*:)[^@]*(?=@)"),
    re.compile(r"(?i)([?&](?:password|passwd|sslpassword)=)[^&\s]*"),
)

T = TypeVar("T")


def make_engine(url: str, create: bool) -> Engine:
    """An engine for `url`; connects to nothing yet.

    Raises:
        StoreError: not a database URL, an unsupported database, a missing folder, or (unless `create`) a missing file.
    """
    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError) as error:
        raise StoreError(
            f"{without_password(url)!r} is not a database URL; write sqlite:///FILE or postgresql://USER@HOST/NAME"
        ) from error
    backend = parsed.get_backend_name()
    if backend == "sqlite":
        _check_file(parsed, create)
        # A store in memory is one connection: each further one would be another, empty store.
        pool = {} if file_of(parsed) else {"poolclass": StaticPool}
        wait = {"timeout": BUSY_SECONDS, "check_same_thread": False}
        engine = _engine(parsed.set(drivername="sqlite+pysqlite"), connect_args=wait, **pool)
        _set_up_sqlite(engine)
        return engine
    if backend == "postgresql":
        if parsed.drivername == "postgresql":
            parsed = parsed.set(drivername="postgresql+psycopg")
        return _engine(parsed, pool_pre_ping=True)
    raise StoreError(f"{without_password(parsed)}: {backend} is not supported; use sqlite or postgresql")


def _engine(url: URL, **options: Any) -> Engine:
    try:
        return create_engine(url, **options)
    except ImportError as error:
        raise StoreError(f"{url.drivername} needs {error.name}: pip install 'moevolve[postgres]'") from error
    except (ArgumentError, TypeError) as error:
        raise StoreError(f"{without_password(url)} cannot be used: {one_line(error)}") from error


def without_password(url: str | URL) -> str:
    """A URL as it may be shown: a password becomes ***, wherever it stands."""
    text = url if isinstance(url, str) else url.render_as_string(hide_password=False)
    for secret in _SECRETS:
        text = secret.sub(r"\1***", text)
    return text


def file_of(url: URL) -> Path | None:
    """The file of a SQLite URL; None for other databases and for one in memory."""
    if url.get_backend_name() != "sqlite" or url.database in (None, "", ":memory:"):
        return None
    return Path(str(url.database))


def _check_file(url: URL, create: bool) -> None:
    path = file_of(url)
    if path is None:
        return
    if path.is_dir():
        raise StoreError(f"{path} is a folder, not a store")
    if not path.parent.is_dir():
        raise StoreError(f"folder {path.parent} of the store {path.name} does not exist; create it first")
    if not create and not path.exists():
        raise StoreError(f"there is no store at {path}")


def _set_up_sqlite(engine: Engine) -> None:
    @event.listens_for(engine, "connect")
    def connect(connection: DBAPIConnection, _: ConnectionPoolEntry) -> None:
        # The driver's own transaction handling begins too late and never IMMEDIATE: it is off, `begin` below does it.
        connection.isolation_level = None
        cursor = connection.cursor()
        for pragma in _PRAGMAS:
            cursor.execute(f"PRAGMA {pragma}")
        cursor.close()

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        # A transaction that reads and then writes can't wait for another writer (SQLITE_BUSY at once), so writers say
        # so from the start.
        write = connection.get_execution_options().get("moevolve_write", False)
        connection.exec_driver_sql("BEGIN IMMEDIATE" if write else "BEGIN")


def use_wal(engine: Engine) -> None:
    """Puts a SQLite store into write-ahead-log mode, which stays with the file; readers then never block the writer."""
    if engine.dialect.name == "sqlite" and file_of(engine.url) is not None:
        raw = engine.raw_connection()
        try:
            raw.cursor().execute("PRAGMA journal_mode=WAL")
        finally:
            raw.close()


@contextmanager
def transaction(engine: Engine, write: bool = False) -> Iterator[Connection]:
    """One transaction: committed at the end of the block, rolled back on any error. Reads see one snapshot.

    Raises:
        StoreError: in place of any database error, in one line.
    """
    try:
        with engine.connect() as connection:
            if engine.dialect.name == "sqlite":
                connection = connection.execution_options(moevolve_write=write)
            elif not write:
                connection = connection.execution_options(isolation_level="REPEATABLE READ")
            with connection.begin():
                yield connection
    except (SQLAlchemyError, OverflowError) as error:
        raise StoreError(f"{without_password(engine.url)}: {one_line(error)}") from error


def one_line(error: Exception) -> str:
    """The first line of what a database driver said."""
    cause = getattr(error, "orig", None) or error
    lines = str(cause).strip().splitlines()
    return lines[0] if lines else type(cause).__name__


def insert_new(connection: Connection, table: Table, rows: Sequence[dict[str, Any]]) -> None:
    """Inserts rows, leaving out those whose key is there already (the first one stays)."""
    if rows:
        make = sqlite.insert if connection.dialect.name == "sqlite" else postgresql.insert
        connection.execute(make(table).on_conflict_do_nothing(), list(rows))


def insert_all(connection: Connection, table: Table, rows: Sequence[dict[str, Any]]) -> None:
    """Inserts rows; a key that is there already is an error."""
    if rows:
        connection.execute(insert(table), list(rows))


def chunks(values: Sequence[T]) -> Iterator[Sequence[T]]:
    """Cuts a sequence into pieces short enough for one IN list."""
    for start in range(0, len(values), CHUNK):
        yield values[start : start + CHUNK]
