"""Schema versions: recognises a store, builds a new one, migrates an older one, refuses all else untouched."""

from __future__ import annotations

from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, Engine, inspect, text

from moevolve.store.errors import StoreError
from moevolve.store.session import file_of, transaction, use_wal, without_password
from moevolve.store.statistics import describe_typical

HEAD = "moevolve_v1"
"""The revision this software writes; a test compares it with the migrations' own head."""
VERSION_TABLE = "alembic_version"
# Any number will do, as long as it is always the same: it keeps two processes from building one store at once.
_LOCK = 7_026_112_437


def prepare(engine: Engine, create: bool) -> None:
    """Brings the database behind `engine` to revision `HEAD`.

    Raises:
        StoreError: it isn't a store and may not become one, or its revision is unknown; nothing was changed then.
    """
    where = str(file_of(engine.url) or without_password(engine.url))
    with transaction(engine) as connection:
        revision = _revision(connection, where, create)
    if revision == HEAD:
        return
    use_wal(engine)
    with transaction(engine, write=True) as connection:
        if connection.dialect.name == "postgresql":
            connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _LOCK})
        # Somebody else may have built it between the two transactions.
        if _revision(connection, where, create) != HEAD:
            command.upgrade(alembic_config(connection), HEAD)
            describe_typical(connection)


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
    if found == [HEAD]:
        return HEAD
    known = {script.revision for script in ScriptDirectory.from_config(alembic_config()).walk_revisions()}
    if len(found) == 1 and found[0] in known:
        return found[0]
    raise StoreError(
        f"{where} has schema version {', '.join(found) or 'none'}, which this moevolve (up to {HEAD}) does not know; "
        "open it with the version that made it, or use another database"
    )
