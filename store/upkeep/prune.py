"""Deletes searches, and evaluations and calibrations that no search needs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

from sqlalchemy import ColumnElement, Connection, Table, and_, delete, exists, func, or_, select

from moevolve.store.leases import fence, revoke_expired, running
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
    shrinks,
)


@dataclass(frozen=True, slots=True)
class PruneReport:
    """Numbers of deleted rows, or of rows that a dry run would delete.

    Attributes:
        bytes: Total size of their genomes, outcomes and calibrations.
        vacuumed: True if the space was returned to the file system; never while a search has a driver.
    """

    searches: int
    individuals: int
    evaluations: int
    calibrations: int
    bytes: int
    vacuumed: bool = False


# A function that returns the fingerprints of the calibrations that a search needs.
CalibrationsOf = Callable[[SearchRecord], Collection[str]]


def prune(store: Store, names: Sequence[str], calibrations_of: CalibrationsOf, dry_run: bool = False) -> PruneReport:
    """Delete searches, by name or id, then evaluations and calibrations that no remaining search needs.

    Evaluations with the model and engine of a running search stay, because its driver may be about to reuse them. While
    pruning, no search can be added and no driver can start, and drivers with an expired lease lose it. A dry run only
    reports what would be deleted.

    Raises:
        LeaseHeldError: One of the searches has a driver. Nothing was deleted.
        StoreError: There is no such search. Nothing was deleted.
    """
    with store.write_transaction() as connection:
        inner = connection.begin_nested()
        lock_against_prune(connection, alone=True)
        ids = [find_search(connection, name).id for name in dict.fromkeys(names)]
        counted = [_drop_search(connection, fence(connection, search_id)) for search_id in dict.fromkeys(ids)]
        left = set(connection.execute(select(searches.c.name)).scalars())
        for name, made in connection.execute(select(shrinks.c.name, shrinks.c.searches)).all():
            if made and left.isdisjoint(made):  # a shrink goes with the last of its searches
                connection.execute(delete(shrinks).where(shrinks.c.name == name))
        evaluated = _drop_evaluations(connection, revoke_expired(connection))
        calibrated = _drop_calibrations(connection, calibrations_of)
        size = sum(size for _, size in counted) + evaluated[1] + calibrated[1]
        found = PruneReport(len(counted), sum(rows for rows, _ in counted), evaluated[0], calibrated[0], size)
        if dry_run:
            inner.rollback()
            return found
        busy = running(connection)
    if busy or not any((found.searches, found.evaluations, found.calibrations)):
        return found
    return replace(found, vacuumed=store.vacuum())


def _drop_search(connection: Connection, search_id: str) -> tuple[int, int]:
    """Delete a search; return the number of its individuals and the bytes of their genomes."""
    for table in (parents, exports, search_tasks, events, leases):
        connection.execute(delete(table).where(table.c.search_id == search_id))
    dropped = _drop(connection, individuals, individuals.c.genome, individuals.c.search_id == search_id)
    connection.execute(delete(searches).where(searches.c.id == search_id))
    return dropped


def _drop(
    connection: Connection, table: Table, content: ColumnElement[object], which: ColumnElement[bool]
) -> tuple[int, int]:
    """Delete rows of a table; return their number and the bytes of one of their columns."""
    size = connection.execute(select(func.coalesce(func.sum(func.length(content)), 0)).where(which)).scalar_one()
    return connection.execute(delete(table).where(which)).rowcount, int(size)


def _drop_evaluations(connection: Connection, live: Collection[str]) -> tuple[int, int]:
    """Delete unneeded evaluations, but those with the model and engine of one of the `live` searches (ids).

    Returns their number and the bytes of their outcomes.
    """
    s, e, total, size = searches.c, evaluations.c, 0, 0
    query = select(s.model_fingerprint, s.engine_fingerprint).where(s.id.in_(live))
    busy = {tuple(row) for row in connection.execute(query)}
    for context in connection.execute(select(contexts).order_by(contexts.c.id)).all():
        model, engine = context.model_fingerprint, context.engine_fingerprint
        if (model, engine) in busy:  # its driver may be about to reuse them
            continue
        here = and_(s.model_fingerprint == model, s.engine_fingerprint == engine)
        has_it = and_(here, s.id == individuals.c.search_id, individuals.c.phenotype_hash == e.phenotype_hash)
        used = or_(exists().where(has_it), and_(e.phenotype_hash == FULL_MODEL, exists().where(here)))
        dropped = _drop(connection, evaluations, e.outcomes, and_(e.context_id == context.id, ~used))
        total, size = total + dropped[0], size + dropped[1]
        empty = ~exists().where(e.context_id == context.id)
        connection.execute(delete(contexts).where(contexts.c.id == context.id, empty))
    return total, size


def _drop_calibrations(connection: Connection, calibrations_of: CalibrationsOf) -> tuple[int, int]:
    """Delete the calibrations that no search needs; return their number and their bytes."""
    c, total, size = calibrations.c, 0, 0
    stored = set(connection.execute(select(c.fingerprint)).scalars())
    needed = (calibrations_of(summary.search) for summary in read_searches(connection))
    for some in chunks(sorted(stored.difference(*needed))):
        dropped = _drop(connection, calibrations, c.content, c.fingerprint.in_(some))
        total, size = total + dropped[0], size + dropped[1]
    return total, size
