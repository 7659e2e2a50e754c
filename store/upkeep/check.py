"""Checks a store for damage: faults that the database finds, missing rows, and rows with another content."""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass

from sqlalchemy import Connection, func, select, text

from moevolve.store.errors import StoreError
from moevolve.store.reader import StoreReader
from moevolve.store.schema import newest_revision
from moevolve.store.tables import calibrations, evaluations, individuals, leases, searches

_COUNTED = (searches, individuals, evaluations, calibrations)


@dataclass(frozen=True, slots=True)
class CheckReport:
    """The contents of a store, and problems found in it.

    Attributes:
        searches, individuals, evaluations, calibrations: Numbers of rows; 0 if damage keeps them from being counted.
    """

    revision: str
    searches: int
    individuals: int
    evaluations: int
    calibrations: int
    bytes: int
    problems: tuple[str, ...]


def check(store: StoreReader) -> CheckReport:
    """Read and check a whole store, to which drivers may go on writing."""
    counts = dict.fromkeys((table.name for table in _COUNTED), 0)
    size, problems = 0, list[str]()
    try:
        with store.transaction() as connection:
            for find in (_damage, _gaps, _changed_genomes):
                problems += find(connection)
            size = _bytes(connection)
            for table in _COUNTED:
                counts[table.name] = connection.execute(select(func.count()).select_from(table)).scalar_one()
    except StoreError as error:  # damage may make a query fail
        problems.append(str(error))
    return CheckReport(newest_revision(), bytes=size, problems=tuple(problems), **counts)


def _bytes(connection: Connection) -> int:
    if connection.dialect.name == "postgresql":
        return int(connection.execute(text("SELECT pg_database_size(current_database())")).scalar_one())
    pages_in, each = (connection.execute(text(f"PRAGMA {name}")).scalar_one() for name in ("page_count", "page_size"))
    return int(pages_in * each)


def _damage(connection: Connection) -> list[str]:
    """Faults that SQLite finds in its file; PostgreSQL has no such test for ordinary users."""
    if connection.dialect.name != "sqlite":
        return []
    lines = connection.execute(text("PRAGMA integrity_check")).scalars()
    found = [f"SQLite: {line}" for line in lines if line != "ok"]
    # SQLite accepts rows whose foreign key matches no row from programs that switch off foreign keys.
    dangling = Counter((row.table, row.parent) for row in connection.execute(text("PRAGMA foreign_key_check")))
    return found + [
        f"{table}: {n:,} rows belong to {parent} that aren't there" for (table, parent), n in dangling.items()
    ]


def _gaps(connection: Connection) -> list[str]:
    """Return the searches with missing individuals or without a lease row, which no constraint excludes."""
    s, i = searches.c, individuals.c
    count, last = func.count(), func.max(i.idx)
    query = select(s.name, count, last).join(individuals, i.search_id == s.id).group_by(s.name)
    gaps = connection.execute(query.having(count != last + 1).order_by(s.name))
    alone = select(s.name).where(~s.id.in_(select(leases.c.search_id))).order_by(s.name)
    return [
        *(f"{name}: {end + 1 - there:,} of its first {end + 1:,} individuals are missing" for name, there, end in gaps),
        *(f"{name}: it has no row in leases" for name in connection.execute(alone).scalars()),
    ]


def _changed_genomes(connection: Connection) -> list[str]:
    """Return the individuals whose genomes have other bytes than those that were recorded."""
    s, i = searches.c, individuals.c
    query = select(s.name, i.idx, i.genome, i.content_hash).join(individuals, i.search_id == s.id)
    rows = connection.execute(query.order_by(s.name, i.idx), execution_options={"yield_per": 1000})
    return [
        f"{name}:{index}: its genome isn't the one that was recorded"
        for name, index, genome, content_hash in rows
        if hashlib.sha256(genome).hexdigest() != content_hash
    ]
