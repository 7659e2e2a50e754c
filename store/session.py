"""Connections and transactions: what differs between SQLite and PostgreSQL is in this file."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from alembic import command
from alembic.config import Config
from alembic.script import ScriptDirectory
from sqlalchemy import URL, Connection, Engine, Table, create_engine, event, insert, inspect, make_url, text
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.exc import ArgumentError, SQLAlchemyError
from sqlalchemy.pool import ConnectionPoolEntry, StaticPool

from moevolve.store.errors import StoreError

# (table, index, "rows, then rows per value of the first column, of the first two columns, ...").
_TYPICAL = (
    ("searches", "sqlite_autoindex_searches_1", "10 1"),
    ("searches", "sqlite_autoindex_searches_2", "10 1"),
    ("individuals", "sqlite_autoindex_individuals_1", "1000000 100000 1"),
    ("individuals", "ix_individuals_rank", "1000000 100000 50000 500 2 1"),
    ("individuals", "ix_individuals_phenotype", "1000000 2 2 2 1"),
    ("parents", "sqlite_autoindex_parents_1", "2000000 200000 2 1"),
    ("parents", "ix_parents_descendants", "2000000 200000 20 1"),
    ("evaluation_contexts", "sqlite_autoindex_evaluation_contexts_1", "100 20 10 1"),
    ("evaluation_contexts", "ix_evaluation_contexts_task_split", "100 10 3"),
    ("evaluations", "sqlite_autoindex_evaluations_1", "1000000 100000 1"),
    ("evaluations", "ix_evaluations_rank", "1000000 100000 1000 2 1 1"),
    ("evaluations", "ix_evaluations_experts", "1000000 100000 25000 250 2 1 1"),
    ("evaluations", "ix_evaluations_parameters", "1000000 100000 25000 250 2 1"),
)


def describe_typical(connection: Connection) -> None:
    """Writes the statistics of a typical store; does nothing on other databases than SQLite."""
    if connection.dialect.name != "sqlite":
        return
    connection.execute(text("ANALYZE"))
    connection.execute(text("DELETE FROM sqlite_stat1"))
    insert = text("INSERT INTO sqlite_stat1 (tbl, idx, stat) VALUES (:tbl, :idx, :stat)")
    connection.execute(insert, [dict(zip(("tbl", "idx", "stat"), row, strict=True)) for row in _TYPICAL])
    connection.execute(text("ANALYZE sqlite_schema"))


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
            # A connection's options are set in place.
            if engine.dialect.name == "sqlite":
                connection.execution_options(moevolve_write=write)
            elif not write:
                connection.execution_options(isolation_level="REPEATABLE READ")
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


VERSION_TABLE = "alembic_version"
# Any number will do, as long as it is always the same: it keeps two processes from building one store at once.
_LOCK = 7_026_112_437


def prepare(engine: Engine, create: bool) -> None:
    """Brings the database behind `engine` to the revision that this software writes.

    Raises:
        StoreError: it isn't a store and may not become one, or its revision is unknown; nothing was changed then.
    """
    where = str(file_of(engine.url) or without_password(engine.url))
    with transaction(engine) as connection:
        revision = _revision(connection, where, create)
    if revision == newest_revision():
        return
    use_wal(engine)
    with transaction(engine, write=True) as connection:
        if connection.dialect.name == "postgresql":
            connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _LOCK})
        # Somebody else may have built it between the two transactions.
        if _revision(connection, where, create) != newest_revision():
            command.upgrade(alembic_config(connection), newest_revision())
            describe_typical(connection)


@cache
def newest_revision() -> str:
    """The revision this software writes: the head of the migrations."""
    head = ScriptDirectory.from_config(alembic_config()).get_current_head()
    assert head is not None
    return head


def alembic_config(connection: Connection | None = None) -> Config:
    """Alembic's configuration, made in memory: the migrations ship inside the package and need no file beside it."""
    config = Config()
    # Alembic reads options through configparser, to which a lone % means interpolation.
    config.set_main_option("script_location", str(Path(__file__).parent / "migrations").replace("%", "%%"))
    config.attributes["connection"] = connection
    return config


def _revision(connection: Connection, where: str, create: bool) -> str | None:
    """The store's revision, None for an empty database that may become a store."""
    tables = set(inspect(connection).get_table_names())
    if not tables:
        if create:
            return None
        raise StoreError(f"{where} is an empty database, not a store of moevolve")
    if VERSION_TABLE not in tables:
        raise StoreError(
            f"{where} is not a store of moevolve: it holds other tables ({', '.join(sorted(tables)[:3])}); "
            "use a database of its own"
        )
    found = [str(row[0]) for row in connection.execute(text(f"SELECT version_num FROM {VERSION_TABLE}"))]
    known = {script.revision for script in ScriptDirectory.from_config(alembic_config()).walk_revisions()}
    if len(found) == 1 and found[0] in known:
        return found[0]
    raise StoreError(
        f"{where} has schema version {', '.join(found) or 'none'}, which this moevolve (up to {newest_revision()}) "
        "does not know; open it with the version that made it, or use another database"
    )
