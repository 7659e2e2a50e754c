"""Connections and transactions: what differs between SQLite and PostgreSQL is in this file."""

from __future__ import annotations

import re
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

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
from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.exc import (
    ArgumentError,
    DBAPIError,
    InterfaceError,
    OperationalError,
    SQLAlchemyError,
)
from sqlalchemy.pool import ConnectionPoolEntry, NullPool, StaticPool

from moevolve.store.errors import StoreError, UnreachableError
from moevolve.store.files import BUSY_SECONDS, check_file, connect_to_read, file_of, may_write

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


_IDLE_S = 20
"""How long a write on PostgreSQL may wait for its client."""
_STEP_S = 0.5
"""How long Ctrl-C may go unheard while a SQLite file is locked."""
# Any number will do, as long as it is always the same, and not that of `schema.py`.
_CONTENT_LOCK = 7_026_112_438
# A server that is cut off without a word is given up within half a minute, as one that says so is.
_POSTGRES_WAITS = {
    "connect_timeout": 10,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 25_000,
}


def make_engine(url: str, create: bool, read_only: bool = False) -> Engine:
    """An engine for `url`; connects to nothing yet.

    Args:
        url: of the database.
        create: whether a missing SQLite file may be made.
        read_only: whether it is only to read: a SQLite file then refuses all else. PostgreSQL refuses it in each
            transaction that doesn't write.

    Raises:
        StoreError: not a database URL, an unsupported database, or a file that can't be a store (`files.check_file`).
    """
    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError) as error:
        raise StoreError(
            f"{without_password(url)!r} is not a database URL; write sqlite:///FILE or postgresql://USER@HOST/NAME"
        ) from error
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
    if path is not None:
        check_file(path, create)
    if path is not None and read_only:
        # Without the right to write beside it, how it is read depends on who has it open: each transaction looks anew.
        pool: dict[str, Any] = {} if may_write(path.resolve()) else {"poolclass": NullPool}
        engine = _engine(url, creator=lambda: connect_to_read(path), **pool)
    else:
        # A store in memory is one connection: each further one would be another, empty store.
        pool = {} if path is not None else {"poolclass": StaticPool}
        wait = {"timeout": BUSY_SECONDS, "check_same_thread": False}
        engine = _engine(url, connect_args=wait, **pool)
    _set_up_sqlite(engine)
    return engine


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
        if connection.get_execution_options().get("moevolve_write", False):
            _begin_to_write(connection)
        else:
            connection.exec_driver_sql("BEGIN")


def wait_for_locks(engine: Engine, patience: Callable[[], float]) -> None:
    """Has writers of a SQLite file wait so many seconds for one another; asked again while they do."""
    engine.update_execution_options(moevolve_patience=patience)


def _begin_to_write(connection: Connection) -> None:
    """Waits until nobody else writes: in short steps, since SQLite's own wait hears neither Ctrl-C nor `patience`.

    Raises:
        StoreError: another process did not end its write in time.
    """
    patience = connection.engine.get_execution_options().get("moevolve_patience", lambda: BUSY_SECONDS)
    raw: Any = connection.connection.driver_connection
    raw.execute(f"PRAGMA busy_timeout={_STEP_S * 1000:.0f}")
    begun = time.monotonic()
    try:
        while not _begun(connection):
            waited = time.monotonic() - begun
            if waited + _STEP_S > patience():
                raise StoreError(
                    f"{without_password(connection.engine.url)}: database is locked: another process writes to it "
                    f"for {waited:.0f} s now; try again when that has ended"
                )
    finally:
        raw.execute(f"PRAGMA busy_timeout={BUSY_SECONDS * 1000}")


def _begun(connection: Connection) -> bool:
    """Whether a write could begin."""
    try:
        connection.exec_driver_sql("BEGIN IMMEDIATE")
    except OperationalError as error:
        if isinstance(error.orig, sqlite3.Error) and error.orig.sqlite_errorcode & 0xFF == sqlite3.SQLITE_BUSY:
            return False
        raise
    return True


def use_wal(engine: Engine) -> None:
    """Puts a SQLite store into write-ahead-log mode, which stays with the file; readers then never block the writer."""
    _outside_transactions(engine, "PRAGMA journal_mode=WAL")


def vacuum(engine: Engine) -> bool:
    """Gives the room of deleted rows in a SQLite store's file back; whether it has one.

    Raises:
        StoreError: others use it, or the disk is full.
    """
    try:
        return _outside_transactions(engine, "VACUUM", "PRAGMA wal_checkpoint(TRUNCATE)")
    except sqlite3.Error as error:
        raise StoreError(f"{without_password(engine.url)}: what is deleted still takes room: {error}") from error


def _outside_transactions(engine: Engine, *statements: str) -> bool:
    """Whether there is a file to do it to."""
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
def transaction(engine: Engine, write: bool = False, bounded: bool = True) -> Iterator[Connection]:
    """One transaction: committed at the end of the block, rolled back on any error. Reads see one snapshot.

    Args:
        engine: of the database.
        write: whether it writes.
        bounded: whether PostgreSQL is to end a write whose client is silent for 20 s: a driver that is suspended in the
            middle of one would keep its search's row locked for as long as it sleeps.

    Raises:
        UnreachableError: the database went away; whether the transaction was committed isn't known.
        StoreError: in place of any other database error, in one line.
    """
    where = without_password(engine.url)
    try:
        with engine.connect() as connection:
            # A connection's options are set in place.
            if engine.dialect.name == "sqlite":
                connection.execution_options(moevolve_write=write)
            elif not write:
                connection.execution_options(isolation_level="REPEATABLE READ", postgresql_readonly=True)
            with connection.begin():
                if write and bounded and engine.dialect.name == "postgresql":
                    connection.exec_driver_sql(f"SET LOCAL idle_in_transaction_session_timeout = {_IDLE_S * 1000:.0f}")
                yield connection
    except (SQLAlchemyError, OverflowError) as error:
        raise (UnreachableError if _is_away(error) else StoreError)(f"{where}: {one_line(error)}") from error


def _is_away(error: Exception) -> bool:
    """Whether a database can't be had just now, for a reason that may pass: it restarts, or cut the connection.

    SQLite is a library. What it calls operational are locks, which were waited for, and full or broken disks.
    """
    if not isinstance(error, DBAPIError):
        return False
    operational = isinstance(error, (OperationalError, InterfaceError)) and not isinstance(error.orig, sqlite3.Error)
    return error.connection_invalidated or operational


def lock_against_prune(connection: Connection, alone: bool = False) -> None:
    """Until the transaction ends, nobody deletes what a search might take for its own; `alone` is for who deletes.

    On PostgreSQL a lock of who adds a search or takes its lease, against who prunes; SQLite has one writer at a time.
    """
    if connection.dialect.name == "postgresql":
        lock = func.pg_advisory_xact_lock if alone else func.pg_advisory_xact_lock_shared
        connection.execute(select(lock(_CONTENT_LOCK)))


def one_line(error: Exception) -> str:
    """The first line of what a database driver said."""
    cause = getattr(error, "orig", None) or error
    lines = str(cause).strip().splitlines()
    return lines[0] if lines else type(cause).__name__


def insert_new(connection: Connection, table: Table, rows: Sequence[dict[str, Any]]) -> int:
    """Inserts rows, leaving out those whose key is there already (the first one stays); how many were new."""
    make = sqlite.insert if connection.dialect.name == "sqlite" else postgresql.insert
    return _execute_insert(connection, make(table).on_conflict_do_nothing(), rows)


def insert_all(connection: Connection, table: Table, rows: Sequence[dict[str, Any]]) -> None:
    """Inserts rows; a key that is there already is an error."""
    _execute_insert(connection, insert(table), rows)


def _execute_insert(connection: Connection, statement: Insert, rows: Sequence[dict[str, Any]]) -> int:
    if not rows:
        return 0
    if connection.dialect.name == "sqlite":
        return connection.execute(statement, list(rows)).rowcount
    # With RETURNING, rows go in statements of many, else in a pipeline: PostgreSQL would not notice a client that is
    # suspended in the middle of one, and keep its search locked (`transaction`).
    return len(connection.execute(statement.returning(literal(1)), list(rows)).all())


def update_all(connection: Connection, statement: Update, rows: Sequence[dict[str, Any]]) -> None:
    """Updates row after row; on PostgreSQL not in a pipeline either."""
    if rows and connection.dialect.name == "sqlite":
        connection.execute(statement, list(rows))
    else:
        for row in rows:
            connection.execute(statement, row)


def chunks(values: Sequence[T]) -> Iterator[Sequence[T]]:
    """Cuts a sequence into pieces short enough for one IN list."""
    for start in range(0, len(values), CHUNK):
        yield values[start : start + CHUNK]
