"""Connections and transactions, with all differences between SQLite and PostgreSQL, and the files of SQLite stores."""

from __future__ import annotations

import os
import re
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

from sqlalchemy import (
    URL,
    Connection,
    Engine,
    Insert,
    Table,
    Update,
    create_engine,
    event,
    func,
    insert,
    literal,
    make_url,
    select,
)
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import ArgumentError, DBAPIError, InterfaceError, OperationalError, SQLAlchemyError
from sqlalchemy.pool import QueuePool

from moevolve.evaluators.errors import first_line, path_fault
from moevolve.store.errors import MissingStoreError, StoreError, UnreachableError

# Seconds for which a write to a SQLite file waits for other writers.
BUSY_SECONDS = 60
# Number of values per IN list, far below every backend's limit on the variables of a statement.
CHUNK = 500

_PRAGMAS = (
    "foreign_keys=ON",
    # In WAL mode, NORMAL loses nothing if a process is killed. A power cut may lose the last commits, but no
    # consistency.
    "synchronous=NORMAL",
    # In pages of 4 KiB. Hashes are spread all over their indexes, so checkpoints are expensive and should be rare. The
    # cache (64 MiB) holds the pages that they touch.
    "wal_autocheckpoint=16384",
    "cache_size=-65536",
)

# Passwords after the user name, up to the last @ as they may have one themselves, and among the parameters of a URL.
_SECRETS = (
    re.compile(r"(://[^:/@]*:).*(?=@)"),
    re.compile(r"(?i)([?&](?:password|passwd|sslpassword)=)[^&\s]*"),
)

T = TypeVar("T")

# Seconds for which a write transaction on PostgreSQL may wait for its client.
_IDLE_S = 20
# Longest delay of Ctrl-C, in seconds, while a SQLite file is locked.
_STEP_S = 0.5
# Key of the PostgreSQL lock of `lock_against_prune`: an arbitrary constant, different from that in `schema.py`.
_CONTENT_LOCK = 7_026_112_438
# An unreachable server is given up within half a minute, also if the network drops packets silently.
_POSTGRES_WAITS = {
    "connect_timeout": 10,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 25_000,
}


def file_of(url: URL) -> Path | None:
    """Return the file of a SQLite URL; None for other databases and for databases in memory."""
    if url.get_backend_name() != "sqlite" or url.database in (None, "", ":memory:"):
        return None
    return Path(str(url.database))


def make_engine(url: str, create: bool, read_only: bool = False) -> Engine:
    """Make an engine for `url`, which doesn't connect yet.

    Args:
        url: URL of the database.
        create: Make a missing SQLite file, which is an empty database.
        read_only: Have SQLite refuse writes. On PostgreSQL, each transaction that doesn't write is read-only anyway.

    Raises:
        StoreError: The URL is invalid, the database isn't supported, or the file can't be a store.
    """
    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError) as error:
        raise StoreError(
            f"{without_password(url)!r} is not a database URL; write sqlite:///FILE or postgresql://USER@HOST/NAME"
        ) from error
    if "@" in (parsed.host or ""):  # the rest of a password, which the database's driver would print
        raise StoreError(f"{without_password(url)}: an @ in a user's name or password is written as %40")
    backend = parsed.get_backend_name()
    if backend == "sqlite":
        return _sqlite_engine(parsed.set(drivername="sqlite+pysqlite"), create, read_only)
    if backend == "postgresql":
        if parsed.drivername == "postgresql":
            parsed = parsed.set(drivername="postgresql+psycopg")
        waits = {name: value for name, value in _POSTGRES_WAITS.items() if name not in parsed.query}
        return _engine(parsed, pool_pre_ping=True, connect_args=waits)
    raise StoreError(f"{without_password(parsed)}: {backend} is not supported; use sqlite or postgresql")


def _sqlite_engine(url: URL, create: bool, read_only: bool) -> Engine:
    path = file_of(url)
    if path is None:
        # Each connection to a database in memory would be another, empty store, so there is only one, for which threads
        # wait: a search's heartbeat would else begin a transaction within the driver's.
        alone = {"poolclass": QueuePool, "pool_size": 1, "max_overflow": 0}
        engine = _engine(url, creator=lambda: _connect(":memory:", read_only), **alone)
        _begin_transactions(engine, None)
        return engine
    _check_file(path, create)
    file = f"file://{quote(str(path.absolute()))}"  # a path may begin with two slashes itself
    if create:
        # SQLite makes the file: closing one that this process has open by other means would drop SQLite's locks on it.
        try:
            sqlite3.connect(f"{file}?mode=rwc", uri=True).close()
        except sqlite3.Error as error:
            raise StoreError(f"{path}: SQLite can't make the store: {error}") from error
    address = f"{file}?mode=rw"  # a file that was deleted isn't made again
    engine = _engine(url, creator=lambda: _connect(address, read_only))
    _begin_transactions(engine, path)
    return engine


def _check_file(path: Path, create: bool) -> None:
    """Refuse a path that can't be a store, or that this user can't write to."""
    try:
        _refuse(path, create)
    except (OSError, ValueError, RuntimeError) as error:
        raise StoreError(path_fault(error, path) or f"{path}: can't be opened: {error}") from error


def _refuse(path: Path, create: bool) -> None:
    if path.is_dir():
        raise StoreError(f"{path} is a folder, not a store")
    if not path.parent.is_dir():
        raise StoreError(f"folder {path.parent} of the store {path.name} does not exist; create it first")
    # SQLite keeps its log next to the file itself, not next to a link to it.
    target, effective = path.resolve(), os.access in os.supports_effective_ids
    places = [place for place in (target, target.parent) if place.exists()]
    writable = all(os.access(place, os.W_OK, effective_ids=effective) for place in places)
    if not create and not path.exists():
        if writable:
            raise MissingStoreError(f"no store at {path}")
        raise StoreError(f"no store at {path}, and no permission to make one there")
    if not writable:
        raise StoreError(
            f"{path}: a store, even one that is only read, needs permission to write to its file and folder, where "
            "SQLite keeps its log; copy it to a folder of yours"
        )


def _connect(address: str, read_only: bool) -> sqlite3.Connection:
    # sqlite3's own transactions (`isolation_level`) begin too late and never IMMEDIATE; `_begin_transactions` does it.
    connection = sqlite3.connect(address, uri=True, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False)
    for pragma in (*_PRAGMAS, *(["query_only=ON"] if read_only else [])):
        connection.execute(f"PRAGMA {pragma}")
    return connection


def _engine(url: URL, **options: object) -> Engine:
    try:
        return create_engine(url, **options)
    except ImportError as error:
        ours = "" if error.name == "psycopg" else "write postgresql:// instead, for the driver that comes with "
        raise StoreError(f"{url.drivername} needs {error.name}: {ours}pip install 'moevolve[postgres]'") from error
    except (ArgumentError, TypeError) as error:
        raise StoreError(f"{without_password(url)} cannot be used: {first_line(error)}") from error


def without_password(url: str | URL) -> str:
    """Return a URL for display, with passwords replaced by ***."""
    text = url if isinstance(url, str) else url.render_as_string(hide_password=False)
    for secret in _SECRETS:
        text = secret.sub(r"\1***", text)
    return text


def _begin_transactions(engine: Engine, path: Path | None) -> None:
    """Begin SQLite's transactions, each in the file that was there at first."""
    opened = None if path is None else _identity(path)

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        if path is not None and opened != _identity(path):
            # SQLite would go on with the file that no path leads to any more, until its last connection closes.
            raise StoreError(
                f"{path}: the store was deleted or replaced while this process had it open; put it back, and start "
                "this again"
            )
        # A transaction that first reads can't wait for another writer when it then writes: it fails at once with
        # SQLITE_BUSY. So transactions that write take the lock when they begin.
        wait_s = connection.get_execution_options().get("moevolve_wait_s")
        if wait_s is None:
            connection.exec_driver_sql("BEGIN")
        else:
            _begin_to_write(connection, wait_s)


def _identity(path: Path) -> tuple[int, int] | None:
    """Return device and inode of a file; None if it doesn't exist."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino


def _begin_to_write(connection: Connection, wait_s: Callable[[], float]) -> None:
    """Begin a write transaction, after waiting for other writers."""
    raw: Any = connection.connection.driver_connection
    # In short steps, because SQLite's own wait can't be interrupted by Ctrl-C.
    raw.execute(f"PRAGMA busy_timeout={_STEP_S * 1000:.0f}")
    start = time.monotonic()
    try:
        while True:
            try:
                connection.exec_driver_sql("BEGIN IMMEDIATE")
                return
            except OperationalError as error:
                busy = getattr(error.orig, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_BUSY
                if not busy or time.monotonic() - start + _STEP_S > wait_s():
                    raise
    finally:
        raw.execute(f"PRAGMA busy_timeout={BUSY_SECONDS * 1000}")


def use_wal(engine: Engine) -> None:
    """Put a SQLite file into write-ahead-log mode for good, so that readers never block the writer."""
    _outside_transactions(engine, "PRAGMA journal_mode=WAL")


def vacuum(engine: Engine) -> bool:
    """Return the space of deleted rows in a SQLite file to the file system; False without a file."""
    try:
        return _outside_transactions(engine, "VACUUM", "PRAGMA wal_checkpoint(TRUNCATE)")
    except sqlite3.Error as error:
        raise StoreError(f"{without_password(engine.url)}: what is deleted still takes room: {error}") from error


def _outside_transactions(engine: Engine, *statements: str) -> bool:
    """Run statements on a SQLite file; False if the database is not one."""
    if engine.dialect.name != "sqlite" or file_of(engine.url) is None:
        return False
    raw = engine.raw_connection()
    try:
        for statement in statements:
            raw.cursor().execute(statement)
    finally:
        raw.close()
    return True


@contextmanager
def transaction(
    engine: Engine, write: bool = False, wait_s: Callable[[], float] = lambda: BUSY_SECONDS
) -> Iterator[Connection]:
    """A transaction that is committed at the end of the block and rolled back on any error. Reads see one snapshot.

    Args:
        engine: Engine of the database.
        write: Allow writes.
        wait_s: Returns the seconds for which a write waits for another writer of a SQLite file; called while it waits.

    Raises:
        UnreachableError: The database is unreachable; the transaction may have been committed.
        StoreError: Any other database error, in one line.
    """
    postgres = engine.dialect.name == "postgresql"
    try:
        with engine.connect() as connection:
            if not postgres:
                connection.execution_options(moevolve_wait_s=wait_s if write else None)
            elif not write:
                connection.execution_options(isolation_level="REPEATABLE READ", postgresql_readonly=True)
            try:
                with connection.begin():
                    if write and postgres:
                        # A driver that is suspended during a write would keep its search's row locked.
                        limit = f"SET LOCAL idle_in_transaction_session_timeout = {_IDLE_S * 1000:.0f}"
                        connection.exec_driver_sql(limit)
                    yield connection
            except BaseException:
                # An error may leave a result half read, which a rollback doesn't end. Until that ends, a SQLite
                # connection goes on seeing its old snapshot.
                if postgres or file_of(engine.url) is not None:  # not the only connection to a database in memory
                    connection.invalidate()
                raise
    # SQLite's errors quote the schema, which may not be UTF-8.
    except (SQLAlchemyError, OverflowError, UnicodeDecodeError) as error:
        kind = UnreachableError if _is_unreachable(error) else StoreError
        # What the database's driver says; SQLAlchemy adds the statement.
        cause = first_line(getattr(error, "orig", None) or error)
        raise kind(f"{without_password(engine.url)}: {cause}") from error


def _is_unreachable(error: Exception) -> bool:
    """Whether a database server is unreachable for a reason that may pass: it restarts, or cut the connection."""
    if not isinstance(error, DBAPIError):
        return False
    # SQLite's operational errors are locks, which were waited for, and full or broken disks.
    operational = isinstance(error, (OperationalError, InterfaceError)) and not isinstance(error.orig, sqlite3.Error)
    return error.connection_invalidated or operational


def lock_against_prune(connection: Connection, alone: bool = False) -> None:
    """Keep others from pruning data that a new search or a new driver might reuse, until the transaction ends.

    The lock `alone` is for pruning itself, and excludes all others.
    """
    if connection.dialect.name != "postgresql":
        return  # SQLite has one writer at a time anyway
    lock = func.pg_advisory_xact_lock if alone else func.pg_advisory_xact_lock_shared
    connection.execute(select(lock(_CONTENT_LOCK)))


def insert_new(connection: Connection, table: Table, rows: Sequence[dict[str, object]]) -> int:
    """Insert the rows whose key is new, and return their number. Existing rows stay unchanged."""
    make = sqlite.insert if connection.dialect.name == "sqlite" else postgresql.insert
    return _execute_insert(connection, make(table).on_conflict_do_nothing(), rows)


def insert_all(connection: Connection, table: Table, rows: Sequence[dict[str, object]]) -> None:
    """Insert rows; an existing key is an error."""
    _execute_insert(connection, insert(table), rows)


def _execute_insert(connection: Connection, statement: Insert, rows: Sequence[dict[str, object]]) -> int:
    if not rows:
        return 0
    if connection.dialect.name == "sqlite":
        return connection.execute(statement, list(rows)).rowcount
    # RETURNING makes the driver send multi-row statements. Otherwise it would use a pipeline, during which PostgreSQL
    # doesn't notice that a client is suspended (`transaction`).
    return len(connection.execute(statement.returning(literal(1)), list(rows)).all())


def update_all(connection: Connection, statement: Update, rows: Sequence[dict[str, object]]) -> None:
    """Run an update for each row; on PostgreSQL one by one, not in a pipeline (see `_execute_insert`)."""
    if rows and connection.dialect.name == "sqlite":
        connection.execute(statement, list(rows))
    else:
        for row in rows:
            connection.execute(statement, row)


def chunks(values: Sequence[T]) -> Iterator[Sequence[T]]:
    """Splits a sequence into parts that are short enough for one IN list."""
    for start in range(0, len(values), CHUNK):
        yield values[start : start + CHUNK]
