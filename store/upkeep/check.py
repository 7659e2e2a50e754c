"""Checks a store for damage: faults that the database finds, missing rows, and rows with another content."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import Connection, String, func, select, text, type_coerce

from moevolve.store.errors import StoreError
from moevolve.store.leases import parse_progress
from moevolve.store.reader import StoreReader
from moevolve.store.schema import newest_revision
from moevolve.store.tables import METADATA, UtcDateTime, calibrations, evaluations, individuals, leases, searches

_COUNTED = (searches, individuals, evaluations, calibrations)
# How text of a column is parsed.
Forms = Mapping[str, Callable[[str], object]]


def _object(text: str) -> object:
    return dict(json.loads(text))


_JSON = ("searches.config", "searches.model_facts", "exports.checks", "shrinks.content")
_FORMS: Forms = {**dict.fromkeys(_JSON, _object), "leases.progress": parse_progress}

# SQLite's names of the types that columns' values have, by Python's.
_TYPES: Mapping[type, tuple[str, ...]] = {
    **dict.fromkeys((int, bool), ("integer",)),
    **dict.fromkeys((str, datetime), ("text",)),
    float: ("real", "integer"),
    bytes: ("blob",),
}


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


def check(store: StoreReader, forms: Forms | None = None) -> CheckReport:
    """Read and check a whole store, to which drivers may go on writing.

    Args:
        store: The store.
        forms: Parse the text of columns, by `table.column`, whose form this part doesn't know.
    """
    counts = dict.fromkeys((table.name for table in _COUNTED), 0)
    size, problems = 0, list[str]()
    try:
        with store.transaction() as connection:
            for find in (_damage, _gaps, _changed_genomes):
                problems += find(connection)
            problems += _unreadable(connection, {**_FORMS, **(forms or {})})
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
        if not isinstance(genome, bytes) or hashlib.sha256(genome).hexdigest() != content_hash
    ]


def _unreadable(connection: Connection, forms: Forms) -> list[str]:
    """Return the columns with values of another type, dates or JSON that can't be parsed, with the first row's key."""
    names = {row.id: row.name for row in connection.execute(select(searches.c.id, searches.c.name))}
    problems = []
    for column in (column for table in METADATA.sorted_tables for column in table.columns):
        key, wrong = [*column.table.primary_key], list[Sequence[object]]()
        if connection.dialect.name == "sqlite":  # which stores any value in any column
            other = func.typeof(column).not_in([*_TYPES[getattr(column.type, "impl", column.type).python_type], "null"])
            wrong += connection.execute(select(*key).where(other).order_by(*key)).all()
        parse = datetime.fromisoformat if isinstance(column.type, UtcDateTime) else forms.get(str(column))
        if parse is not None and not wrong:
            query = select(*key, type_coerce(column, String)).where(column.is_not(None)).order_by(*key)
            rows = connection.execute(query.execution_options(yield_per=1000))
            wrong += [of for *of, value in rows if not _is_readable(parse, value)]
        if wrong:
            first = ":".join(str(names.get(str(part), part)) for part in wrong[0])
            problems.append(f"{column}: {len(wrong):,} values can't be read, the first that of {first}")
    return problems


def _is_readable(parse: Callable[[str], object], value: object) -> bool:
    try:
        parse(str(value))
    except Exception:  # noqa: BLE001 - parsers may fail in any way, and know why themselves
        return False
    return True
