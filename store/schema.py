"""The schema of a database: recognised, created in an empty database, and upgraded on request."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from sqlalchemy import Connection, Engine, inspect, select, text

from moevolve.store import leases
from moevolve.store.errors import LeaseHeldError, MissingStoreError, StoreError
from moevolve.store.records import Upgrade
from moevolve.store.session import file_of, make_engine, transaction, use_wal, without_password
from moevolve.store.tables import METADATA, searches

if TYPE_CHECKING:
    from alembic.config import Config

# The revisions of `migrations/versions`, oldest first. Alembic could list them, but importing it takes a sixth of a
# command's start: only upgrading a store does.
REVISIONS = ("moevolve_v1",)

# (table, index, numbers): rows of the table, then rows per distinct value of the index's first column, of its first two
# columns, and so on. SQLite chooses bad plans without statistics, and those of a new store would mislead it.
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
    ("evaluations", "ix_evaluations_costs", "1000000 100000 1 1 1 1 1"),
    ("evaluations", "ix_evaluations_active_parameters", "1000000 100000 25000 250 2 1"),
)


def write_typical_statistics(connection: Connection) -> None:
    """Write the planner statistics of a typical store to a SQLite database; do nothing on other databases."""
    if connection.dialect.name != "sqlite":
        return
    connection.execute(text("ANALYZE"))
    connection.execute(text("DELETE FROM sqlite_stat1"))
    insert = text("INSERT INTO sqlite_stat1 (tbl, idx, stat) VALUES (:tbl, :idx, :stat)")
    connection.execute(insert, [dict(zip(("tbl", "idx", "stat"), row, strict=True)) for row in _TYPICAL])
    connection.execute(text("ANALYZE sqlite_schema"))


VERSION_TABLE = "alembic_version"
# Key of the PostgreSQL lock that keeps two processes from building or upgrading a store at once; an arbitrary constant.
_LOCK = 7_026_112_437


def prepare(engine: Engine, create: bool) -> bool:
    """Check that a database has the newest schema, and builds it in an empty database if `create` is true.

    Returns:
        Whether the schema was built.

    Raises:
        StoreError: The database isn't a store, or its schema is older or unknown. Nothing was changed.
    """
    with transaction(engine) as connection:
        revision = _revision(connection)
    built = False
    if revision is None and not create:
        raise MissingStoreError(f"{location(engine)} is an empty database, not a store of moevolve")
    if revision is None:
        use_wal(engine)
        with transaction(engine, write=True) as connection:
            _lock(connection)
            # Another process may have built it between the two transactions.
            revision = _revision(connection)
            if revision is None:
                _build(connection)
                revision, built = newest_revision(), True
    if revision != newest_revision():
        url = shlex.quote(without_password(engine.url.set(drivername=engine.dialect.name)))
        raise StoreError(
            f"{location(engine)} has schema {revision}, older than this moevolve's {newest_revision()}: upgrade it "
            f"with `moevolve db upgrade --store {url}`"
        )
    return built


def upgrade(url: str) -> Upgrade:
    """Upgrade the store at `url` to the newest schema, in one transaction that excludes other writers.

    Raises:
        LeaseHeldError: A search has a driver. Nothing was changed.
        StoreError: The database isn't a store, or its schema is unknown. Nothing was changed.
    """
    engine = make_engine(url, create=False)
    try:
        with transaction(engine, write=True) as connection:
            _lock(connection)
            before = _revision(connection)
            if before is None:
                raise StoreError(f"{location(engine)} is an empty database, not a store of moevolve")
            if before != newest_revision():
                _refuse_drivers(connection)
                from alembic import command

                command.upgrade(alembic_config(connection), newest_revision())
                write_typical_statistics(connection)
            return Upgrade(before, newest_revision())
    finally:
        engine.dispose()


def _refuse_drivers(connection: Connection) -> None:
    """Refuse an upgrade while searches are running, and keep new drivers away until the transaction ends."""
    if connection.dialect.name == "postgresql":
        connection.execute(text("LOCK TABLE leases IN ACCESS EXCLUSIVE MODE"))
    running = leases.running(connection)
    if running:
        s = searches.c
        names = connection.execute(select(s.id, s.name).where(s.id.in_(running)).order_by(s.name))
        named = ", ".join(f"{name} by {running[search_id].owner}" for search_id, name in names)
        where = location(connection.engine)
        raise LeaseHeldError(f"{where} has searches that are being run ({named}): stop them first")


def _build(connection: Connection) -> None:
    """Make the tables in an empty database. Migrations would end with the same, but take half a second."""
    METADATA.create_all(connection, checkfirst=False)
    key = f"CONSTRAINT {VERSION_TABLE}_pkc PRIMARY KEY (version_num)"
    connection.execute(text(f"CREATE TABLE {VERSION_TABLE} (version_num VARCHAR(32) NOT NULL, {key})"))
    connection.execute(text(f"INSERT INTO {VERSION_TABLE} VALUES (:revision)"), {"revision": newest_revision()})
    write_typical_statistics(connection)


def _lock(connection: Connection) -> None:
    """Keep other processes from building or upgrading until the transaction ends; SQLite has one writer anyway."""
    if connection.dialect.name == "postgresql":
        connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _LOCK})


def newest_revision() -> str:
    """Return the newest schema revision, which this software reads and writes."""
    return REVISIONS[-1]


def alembic_config(connection: Connection | None = None) -> Config:
    """Alembic's configuration, made in memory because the migrations are part of the package."""
    from alembic.config import Config

    config = Config()
    # Alembic reads options through configparser, which interpolates a lone %.
    config.set_main_option("script_location", str(Path(__file__).parent / "migrations").replace("%", "%%"))
    config.attributes["connection"] = connection
    return config


def location(engine: Engine) -> str:
    """Return the file of a SQLite database; the URL of others, without its password."""
    return str(file_of(engine.url) or without_password(engine.url))


def _revision(connection: Connection) -> str | None:
    """Return the schema revision of a store; None for an empty database. Refuses databases of other programs."""
    where, tables = location(connection.engine), set(inspect(connection).get_table_names())
    if not tables:
        return None
    if VERSION_TABLE not in tables:
        raise StoreError(
            f"{where} is not a store of moevolve: it holds other tables ({', '.join(sorted(tables)[:3])}); "
            "use a database of its own"
        )
    found = [str(row[0]) for row in connection.execute(text(f"SELECT version_num FROM {VERSION_TABLE}"))]
    if len(found) == 1 and found[0] in REVISIONS:
        return found[0]
    raise StoreError(
        f"{where} has schema version {', '.join(found) or 'none'}, which this moevolve (up to {newest_revision()}) "
        "does not know; open it with the version that made it, or use another database"
    )
