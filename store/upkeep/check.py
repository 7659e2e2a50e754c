"""Whether a store is damaged: what its database finds, and what a search could not be resumed from."""

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
"""Faults of its file that SQLite lists at most."""

_COUNTED = (searches, individuals, evaluations, calibrations)


@dataclass(frozen=True, slots=True)
class Checked:
    """What a store holds, and what is wrong with it.

    Attributes:
        revision: of its schema.
        searches, individuals, evaluations, calibrations: how many there are; 0 where that is damaged.
        bytes: that the database takes on its disk.
        problems: one line each.
    """

    revision: str
    searches: int
    individuals: int
    evaluations: int
    calibrations: int
    bytes: int
    problems: tuple[str, ...]


def check(store: StoreReader) -> Checked:
    """Looks a whole store through; a driver may go on writing to it."""
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
        except StoreError as error:  # what can't be read is a problem, too
            problems.append(str(error))
    return Checked(newest_revision(), bytes=size, problems=tuple(dict.fromkeys(problems)), **counts)


def _bytes(connection: Connection) -> int:
    if connection.dialect.name == "postgresql":
        return int(connection.execute(text("SELECT pg_database_size(current_database())")).scalar_one())
    pages_in, each = (connection.execute(text(f"PRAGMA {name}")).scalar_one() for name in ("page_count", "page_size"))
    return int(pages_in * each)


def _damage(connection: Connection) -> Iterator[str]:
    """What SQLite finds in its file; PostgreSQL has no such test that users may run."""
    if connection.dialect.name == "sqlite":
        lines = connection.execute(text(f"PRAGMA integrity_check({LISTED})")).scalars()
        yield from (f"SQLite: {line}" for line in lines if line != "ok")


def _dangling(connection: Connection) -> Iterator[str]:
    """Rows that belong to rows which aren't there; SQLite lets them be where foreign keys were switched off."""
    if connection.dialect.name == "sqlite":
        rows = connection.execute(text("PRAGMA foreign_key_check"))
        found = Counter((row.table, row.parent) for row in rows)
        yield from (f"{table}: {n:,} rows belong to {parent} that aren't there" for (table, parent), n in found.items())


def _gaps(connection: Connection) -> Iterator[str]:
    """What no constraint says: a search's individuals are numbered without gaps, and it has a row for its lease."""
    s, i = searches.c, individuals.c
    count, last = func.count(), func.max(i.idx)
    query = select(s.name, count, last).join(individuals, i.search_id == s.id).group_by(s.name)
    for name, there, newest in connection.execute(query.having(count != last + 1).order_by(s.name)):
        yield f"{name}: {newest + 1 - there:,} of its first {newest + 1:,} individuals are missing"
    alone = select(s.name).where(~s.id.in_(select(leases.c.search_id))).order_by(s.name)
    yield from (f"{name}: it has no row in leases" for name in connection.execute(alone).scalars())
