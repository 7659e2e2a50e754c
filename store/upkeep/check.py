"""Checks a store for damage: faults that the database finds, and rows without which a search can't be resumed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from sqlalchemy import Connection, func, select, text

from moevolve.store.errors import StoreError
from moevolve.store.reader import StoreReader
from moevolve.store.schema import newest_revision
from moevolve.store.tables import calibrations, evaluations, individuals, leases, searches

LISTED = 1_000
"""Maximum number of faults that SQLite lists."""

_COUNTED = (searches, individuals, evaluations, calibrations)


@dataclass(frozen=True, slots=True)
class CheckReport:
    """The contents of a store, and problems found in it.

    Attributes:
        revision: Revision of the schema.
        searches, individuals, evaluations, calibrations: Numbers of rows; 0 where the table is damaged.
        bytes: Size of the database on disk.
        problems: Descriptions of one line each.
    """

    revision: str
    searches: int
    individuals: int
    evaluations: int
    calibrations: int
    bytes: int
    problems: tuple[str, ...]


def check(store: StoreReader) -> CheckReport:
    """Reads and checks a whole store, to which drivers may go on writing."""
    counts = dict.fromkeys((table.name for table in _COUNTED), 0)
    size, problems = 0, list[str]()

    def count(connection: Connection) -> Iterator[str]:
        nonlocal size
        size = _bytes(connection)
        for table in _COUNTED:
            counts[table.name] = int(connection.execute(select(func.count()).select_from(table)).scalar_one())
        yield from ()

    finders: tuple[Callable[[Connection], Iterator[str]], ...] = (_damage, _dangling, _gaps, count)
    for find in finders:
        try:
            with store.transaction() as connection:
                problems += find(connection)
        except StoreError as error:  # damage may make a query fail
            problems.append(str(error))
    return CheckReport(newest_revision(), bytes=size, problems=tuple(dict.fromkeys(problems)), **counts)


def _bytes(connection: Connection) -> int:
    if connection.dialect.name == "postgresql":
        return int(connection.execute(text("SELECT pg_database_size(current_database())")).scalar_one())
    pages_in, each = (connection.execute(text(f"PRAGMA {name}")).scalar_one() for name in ("page_count", "page_size"))
    return int(pages_in * each)


def _damage(connection: Connection) -> Iterator[str]:
    """Faults that SQLite finds in its file; PostgreSQL has no such test for ordinary users."""
    if connection.dialect.name == "sqlite":
        lines = connection.execute(text(f"PRAGMA integrity_check({LISTED})")).scalars()
        yield from (f"SQLite: {line}" for line in lines if line != "ok")


def _dangling(connection: Connection) -> Iterator[str]:
    """Rows whose foreign key matches no row, which SQLite accepts from programs that switch off foreign keys."""
    if connection.dialect.name == "sqlite":
        rows = connection.execute(text("PRAGMA foreign_key_check"))
        found = Counter((row.table, row.parent) for row in rows)
        yield from (f"{table}: {n:,} rows belong to {parent} that aren't there" for (table, parent), n in found.items())


def _gaps(connection: Connection) -> Iterator[str]:
    """Searches with missing individuals or without a lease row, which no constraint excludes."""
    s, i = searches.c, individuals.c
    count, last = func.count(), func.max(i.idx)
    query = select(s.name, count, last).join(individuals, i.search_id == s.id).group_by(s.name)
    for name, there, newest in connection.execute(query.having(count != last + 1).order_by(s.name)):
        yield f"{name}: {newest + 1 - there:,} of its first {newest + 1:,} individuals are missing"
    alone = select(s.name).where(~s.id.in_(select(leases.c.search_id))).order_by(s.name)
    yield from (f"{name}: it has no row in leases" for name in connection.execute(alone).scalars())
