"""Checks a store for damage: faults that the database finds, missing rows, and rows with another content."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from sqlalchemy import Column, Connection, Dialect, Table, func, literal, select, text, type_coerce
from sqlalchemy.types import NULLTYPE

from moevolve.store.errors import DamagedError, StoreError
from moevolve.store.leases import parse_progress
from moevolve.store.reader import StoreReader
from moevolve.store.schema import newest_revision
from moevolve.store.tables import METADATA, calibrations, evaluations, individuals, leases, searches

_COUNTED = (searches, individuals, evaluations, calibrations)
# How text of a column is parsed.
Forms = Mapping[str, Callable[[str], object]]


def _object(text: str) -> object:
    return dict(json.loads(text))


_JSON = ("searches.config", "searches.model_facts", "exports.checks", "shrinks.content")
_FORMS: Forms = {**dict.fromkeys(_JSON, _object), "leases.progress": parse_progress}


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
    size, problems, parsers = 0, list[str](), {**_FORMS, **(forms or {})}
    tables = (partial(_unreadable, table=table, forms=parsers) for table in METADATA.sorted_tables)
    finders: list[Callable[[Connection], list[str]]] = [_damage, _gaps, _changed_genomes, *tables]
    for find in finders:
        try:
            with store.transaction() as connection:
                problems += find(connection)
        except DamagedError:
            pass  # `_unreadable` names the value
        except StoreError as error:  # damage may make a query fail
            problems += [] if str(error) in problems else [str(error)]
    try:
        with store.transaction() as connection:
            size = _bytes(connection)
            for table in _COUNTED:
                counts[table.name] = connection.execute(select(func.count()).select_from(table)).scalar_one()
    except StoreError as error:
        problems = problems or [str(error)]
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
    """Return the searches without a lease row, or where individuals are missing, which no constraint excludes."""
    s, i = searches.c, individuals.c
    count, last = func.count(), func.max(i.idx)
    query = select(s.name, count, last).join(individuals, i.search_id == s.id).group_by(s.name)
    gaps = connection.execute(query.having(count != last + 1).order_by(s.name))
    alone = select(s.name).where(~s.id.in_(select(leases.c.search_id))).order_by(s.name)
    won = select(literal(1)).where(i.search_id == s.id, i.idx == s.winner).exists()
    lost = select(s.name).where(s.winner.is_not(None), ~won).order_by(s.name)
    return [
        *(f"{name}: {end + 1 - there:,} of its first {end + 1:,} individuals are missing" for name, there, end in gaps),
        *(f"{name}: it has no row in leases" for name in connection.execute(alone).scalars()),
        *(f"{name}: its winner isn't among its individuals" for name in connection.execute(lost).scalars()),
    ]


def _changed_genomes(connection: Connection) -> list[str]:
    """Return the individuals whose genomes have other bytes than those that were recorded."""
    s, i = searches.c, individuals.c
    query = select(s.name, i.idx, type_coerce(i.genome, NULLTYPE), i.content_hash)
    query = query.join(individuals, i.search_id == s.id)
    rows = connection.execute(query.order_by(s.name, i.idx), execution_options={"yield_per": 1000})
    return [
        f"{name}:{index}: its genome isn't the one that was recorded"
        for name, index, genome, content_hash in rows
        if not isinstance(genome, bytes) or hashlib.sha256(genome).hexdigest() != content_hash
    ]


def _unreadable(connection: Connection, table: Table, forms: Forms) -> list[str]:
    """Return the columns with values that the column can't have or that can't be parsed, with the first row's key."""
    columns, key = list(table.columns), len(table.primary_key.columns)
    raw = [type_coerce(column, NULLTYPE) for column in [*table.primary_key.columns, *columns]]
    found = connection.execute(select(*raw).order_by(*table.primary_key.columns).execution_options(yield_per=1000))
    wrong: dict[str, list[Sequence[object]]] = {}
    kinds = [one[1] for one in found.cursor.description][key:]
    parsers = [_parser(column, connection.dialect, kind, forms) for column, kind in zip(columns, kinds, strict=True)]
    for row in found:
        for column, parse, value in zip(columns, parsers, row[key:], strict=True):
            if not _is_readable(parse, value):
                wrong.setdefault(str(column), []).append(row[:key])
    named = select(*(type_coerce(column, NULLTYPE) for column in (searches.c.id, searches.c.name)))
    names = {str(row[0]): row[1] for row in connection.execute(named)} if wrong else {}
    return [
        f"{column}: {len(keys):,} values can't be read, the first that of "
        + ":".join(str(names.get(str(part), part)) for part in keys[0])
        for column, keys in wrong.items()
    ]


def _parser(column: Column[Any], dialect: Dialect, kind: object, forms: Forms) -> Callable[[Any], object]:
    """Return the function that parses what a database's driver returns for a column, of a `kind` of its own."""
    read = column.type.dialect_impl(dialect).result_processor(dialect, kind)
    assert read is not None
    form = forms.get(str(column))
    return read if form is None else lambda value: value is None or form(str(read(value)))


def _is_readable(parse: Callable[[Any], object], value: object) -> bool:
    try:
        parse(value)
    except Exception:  # noqa: BLE001 - parsers may fail in any way, and know why themselves
        return False
    return True
