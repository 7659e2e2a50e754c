"""Which schema a database has, and bringing it to the one that this software writes: made new, or upgraded if asked."""

from __future__ import annotations

import shlex
from functools import cache
from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, Engine, inspect, select, text

from moevolve.store import leases
from moevolve.store.errors import LeaseHeldError, StoreError
from moevolve.store.files import file_of
from moevolve.store.records import Upgrade
from moevolve.store.session import make_engine, transaction, use_wal, without_password
from moevolve.store.tables import searches

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


VERSION_TABLE = "alembic_version"
# Any number will do, as long as it is always the same: it keeps two processes from building one store at once.
_LOCK = 7_026_112_437


def prepare(engine: Engine, create: bool) -> bool:
    """Sees to it that the database behind `engine` has the schema that this software writes; builds it in an empty one.

    Args:
        engine: of the database.
        create: whether an empty database may become a store.

    Returns:
        Whether one did.

    Raises:
        StoreError: it isn't a store and may not become one, or its schema is older or unknown; nothing was changed.
    """
    with transaction(engine) as connection:
        revision = _revision(connection)
    built = False
    if revision is None and not create:
        raise StoreError(f"{place(engine)} is an empty database, not a store of moevolve")
    if revision is None:
        use_wal(engine)
        with transaction(engine, write=True) as connection:
            _lock(connection)
            # Somebody else may have built it between the two transactions.
            revision = _revision(connection)
            if revision is None:
                revision, built = _migrate(connection), True
    if revision != newest_revision():
        url = shlex.quote(without_password(engine.url.set(drivername=engine.dialect.name)))
        raise StoreError(
            f"{place(engine)} has schema {revision}, older than this moevolve's {newest_revision()}: upgrade it with "
            f"`moevolve db upgrade --store {url}`"
        )
    return built


def upgrade(url: str) -> Upgrade:
    """Brings a store to the schema that this software writes, in one transaction that keeps everybody else out.

    Args:
        url: of the store.

    Raises:
        LeaseHeldError: a search is being run. Nothing was changed.
        StoreError: it isn't a store, or its schema is unknown. Nothing was changed.
    """
    engine = make_engine(url, create=False)
    try:
        return _upgrade(engine)
    finally:
        engine.dispose()


def _upgrade(engine: Engine) -> Upgrade:
    with transaction(engine, write=True) as connection:
        _lock(connection)
        before = _revision(connection)
        if before is None:
            raise StoreError(f"{place(engine)} is an empty database, not a store of moevolve")
        if before == newest_revision():
            return Upgrade(before, before)
        if inspect(connection).has_table("leases"):
            if connection.dialect.name == "postgresql":
                connection.execute(text("LOCK TABLE leases IN ACCESS EXCLUSIVE MODE"))
            running = leases.running(connection)
            if running:
                s = searches.c
                names = connection.execute(select(s.id, s.name).where(s.id.in_(running)).order_by(s.name))
                named = ", ".join(f"{name} by {running[search_id].owner}" for search_id, name in names)
                raise LeaseHeldError(f"{place(engine)} has searches that are being run ({named}): stop them first")
        return Upgrade(before, _migrate(connection))


def _migrate(connection: Connection) -> str:
    command.upgrade(alembic_config(connection), newest_revision())
    describe_typical(connection)
    return newest_revision()


def _lock(connection: Connection) -> None:
    """Until the transaction ends, nobody else builds or upgrades; SQLite's writers are one at a time anyway."""
    if connection.dialect.name == "postgresql":
        connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _LOCK})


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


def place(engine: Engine) -> str:
    """Where a database is: the file of SQLite's, the URL of others, without its password."""
    return str(file_of(engine.url) or without_password(engine.url))


def _revision(connection: Connection) -> str | None:
    """The store's revision, None for an empty database.

    Raises:
        StoreError: another program's database, or a revision that this software doesn't know.
    """
    where, tables = place(connection.engine), set(inspect(connection).get_table_names())
    if not tables:
        return None
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
