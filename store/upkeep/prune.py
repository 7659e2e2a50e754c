"""Deleting what nobody needs: searches by name, and what is left over from others."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sqlalchemy import ColumnElement, Connection, Table, and_, delete, exists, func, or_, select

from moevolve.store.leases import fence, running, shut_out
from moevolve.store.lineage import find_search
from moevolve.store.queries import read_searches
from moevolve.store.records import FULL_MODEL, SearchRecord
from moevolve.store.repository import Store
from moevolve.store.session import chunks, lock_against_prune
from moevolve.store.tables import (
    calibrations,
    contexts,
    evaluations,
    events,
    exports,
    individuals,
    leases,
    parents,
    search_tasks,
    searches,
)


@dataclass(frozen=True, slots=True)
class Pruned:
    """What was deleted, or would be.

    Attributes:
        searches, individuals, evaluations, calibrations: how many.
        bytes: of their genomes, outcomes and calibrations.
        vacuumed: whether a SQLite file was made smaller by it, which waits until no search is being run.
    """

    searches: int
    individuals: int
    evaluations: int
    calibrations: int
    bytes: int
    vacuumed: bool = False


Needed = Callable[[SearchRecord], Collection[str]]
"""Fingerprints of the calibrations that a search starts from."""


def prune(store: Store, names: Sequence[str], needed: Needed, dry_run: bool = False) -> Pruned:
    """Deletes searches, and evaluations and calibrations that no search has any use for then.

    Evaluations of a model, on an engine, that a search is being run on stay for now: its driver may be about to use
    them. None begins meanwhile, nor is any search added; and a driver that didn't renew its lease in time has lost it.

    Args:
        store: the store.
        names: of the searches, or their ids.
        needed: fingerprints of the calibrations that a search starts from; asked of all that stay.
        dry_run: only say what would be deleted.

    Raises:
        LeaseHeldError: one of the searches is being run. Nothing was deleted.
        StoreError: no such search. Nothing was deleted.
    """
    with store.write_transaction(bounded=False) as connection:
        inner = connection.begin_nested()
        found = _prune(connection, names, needed)
        if dry_run:
            inner.rollback()
            return found
        inner.commit()
        busy = running(connection)
    if busy or not any((found.searches, found.evaluations, found.calibrations)):
        return found
    return replace(found, vacuumed=store.vacuum())


def _prune(connection: Connection, names: Sequence[str], needed: Needed) -> Pruned:
    lock_against_prune(connection, alone=True)
    ids = [find_search(connection, name).id for name in dict.fromkeys(names)]
    counted = [_drop_search(connection, fence(connection, search_id)) for search_id in dict.fromkeys(ids)]
    evaluated = _drop_evaluations(connection, _unused(connection, shut_out(connection)))
    calibrated = _drop_calibrations(connection, _idle(connection, needed))
    size = sum(size for _, size in counted) + evaluated[1] + calibrated[1]
    return Pruned(len(counted), sum(rows for rows, _ in counted), evaluated[0], calibrated[0], size)


def _drop_search(connection: Connection, search_id: str) -> tuple[int, int]:
    """How many individuals it had, and bytes of their genomes."""
    connection.execute(delete(parents).where(parents.c.search_id == search_id))
    connection.execute(delete(exports).where(exports.c.search_id == search_id))
    dropped = _drop(connection, individuals, individuals.c.genome, individuals.c.search_id == search_id)
    connection.execute(delete(search_tasks).where(search_tasks.c.search_id == search_id))
    for table in (events, leases):
        connection.execute(delete(table).where(table.c.search_id == search_id))
    connection.execute(delete(searches).where(searches.c.id == search_id))
    return dropped


def _drop(
    connection: Connection, table: Table, content: ColumnElement[Any], which: ColumnElement[bool]
) -> tuple[int, int]:
    """Deletes rows of a table; how many they were, and the bytes of one of their columns."""
    size = connection.execute(select(func.coalesce(func.sum(func.length(content)), 0)).where(which)).scalar_one()
    return connection.execute(delete(table).where(which)).rowcount, int(size)


def _unused(connection: Connection, live: Collection[str]) -> list[Any]:
    """Contexts of models and engines that none of the searches (ids) that are being run is about."""
    s = searches.c
    query = select(s.model_fingerprint, s.engine_fingerprint).where(s.id.in_(live))
    busy = {tuple(row) for row in connection.execute(query)}
    rows = connection.execute(select(contexts).order_by(contexts.c.id)).all()
    return [row for row in rows if (row.model_fingerprint, row.engine_fingerprint) not in busy]


def _drop_evaluations(connection: Connection, spare: Sequence[Any]) -> tuple[int, int]:
    e, total, size = evaluations.c, 0, 0
    for context in spare:
        s = searches.c
        here = and_(
            s.model_fingerprint == context.model_fingerprint, s.engine_fingerprint == context.engine_fingerprint
        )
        has_it = and_(here, s.id == individuals.c.search_id, individuals.c.phenotype_hash == e.phenotype_hash)
        used = or_(exists().where(has_it), and_(e.phenotype_hash == FULL_MODEL, exists().where(here)))
        dropped = _drop(connection, evaluations, e.outcomes, and_(e.context_id == context.id, ~used))
        total, size = total + dropped[0], size + dropped[1]
        empty = ~exists().where(e.context_id == context.id)
        connection.execute(delete(contexts).where(contexts.c.id == context.id, empty))
    return total, size


def _idle(connection: Connection, needed: Needed) -> set[str]:
    """Calibrations that no search starts from."""
    there = set(connection.execute(select(calibrations.c.fingerprint)).scalars())
    return there.difference(*(needed(summary.search) for summary in read_searches(connection)))


def _drop_calibrations(connection: Connection, idle: Collection[str]) -> tuple[int, int]:
    c, total, size = calibrations.c, 0, 0
    for some in chunks(sorted(idle)):
        dropped = _drop(connection, calibrations, c.content, c.fingerprint.in_(some))
        total, size = total + dropped[0], size + dropped[1]
    return total, size
