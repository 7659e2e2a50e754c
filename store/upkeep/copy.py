"""Copies whole searches from one store to another, between databases of any kind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import Connection, Row, Table, func, select, update

from moevolve.store.errors import StoreError
from moevolve.store.leases import fence, free_lease
from moevolve.store.lineage import find_search
from moevolve.store.queries import context_ids, read_evaluations, read_history
from moevolve.store.reader import StoreReader
from moevolve.store.records import FULL_MODEL, ExportRecord, SearchRecord, StoredShrink
from moevolve.store.repository import Store
from moevolve.store.session import CHUNK, insert_all, insert_new, lock_against_prune
from moevolve.store.tables import (
    calibrations,
    evaluations,
    events,
    exports,
    individuals,
    leases,
    search_tasks,
    searches,
    shrinks,
)
from moevolve.store.upkeep.prune import CalibrationsOf
from moevolve.store.writes import write_evaluations, write_export, write_individuals, write_shrink

# Counted before and after, since writes of rows that are there change nothing and say so nowhere.
_COUNTED = (individuals, evaluations, calibrations, exports)


@dataclass(frozen=True, slots=True)
class CopyReport:
    """Numbers of rows that a copy added to the target; rows that existed there are not counted.

    Attributes:
        decided: Number of individuals that were pending in the target and now have an outcome.
    """

    searches: tuple[str, ...]
    individuals: int
    decided: int
    evaluations: int
    calibrations: int
    exports: int


def copy(source: StoreReader, target: Store, names: Sequence[str], calibrations_of: CalibrationsOf) -> CopyReport:
    """Copy searches, by name or id, with all that belongs to them, in one transaction of the target.

    A running search is copied in its present state, and can be resumed in the target. Repeating a copy brings it up to
    date: the same rules hold as for a driver that repeats its writes (`Store`).

    Raises:
        LeaseHeldError: One of the searches has a driver in the target.
        StoreError: There is no such search, or the target has another search of that name or an individual with
            another genome or fitness. Nothing was copied.
    """
    needed = {name: calibrations_of(source.search(name)) for name in dict.fromkeys(names)}
    # The source's transaction ends before the target's: if it fails, nothing is committed.
    with target.write_transaction() as there, source.transaction() as here:
        lock_against_prune(there)
        found = [find_search(here, name) for name in needed]
        before = _counts(there)
        decided = 0
        for search, fingerprints in zip(found, needed.values(), strict=True):
            _copy_search(here, there, search)
            for fingerprint in sorted(fingerprints):
                query = select(calibrations).where(calibrations.c.fingerprint == fingerprint)
                insert_new(there, calibrations, [row._asdict() for row in here.execute(query)])
            decided += _copy_individuals(here, there, search)
            for row in _rows(here, exports, search):
                write_export(there, search.id, row.idx, ExportRecord(row.path, row.form, row.checks, row.created_at))
        names_copied = {search.name for search in found}
        for row in here.execute(select(shrinks)):
            if not names_copied.isdisjoint(row.searches):
                write_shrink(there, StoredShrink(**row._asdict()))
        added = {name: count - before[name] for name, count in _counts(there).items()}
    return CopyReport(tuple(search.name for search in found), decided=decided, **added)


def _counts(connection: Connection) -> dict[str, int]:
    return {table.name: connection.execute(select(func.count()).select_from(table)).scalar_one() for table in _COUNTED}


def _rows(connection: Connection, table: Table, search: SearchRecord) -> Sequence[Row[*tuple[object, ...]]]:
    return connection.execute(select(table).where(table.c.search_id == search.id)).all()


def _copy_search(here: Connection, there: Connection, search: SearchRecord) -> None:
    """Add the search to the target, or updates its state there."""
    s = searches.c
    row = here.execute(select(searches).where(s.id == search.id)).one()._asdict()
    state = {name: row[name] for name in ("status", "status_reason", "winner", "updated_at")}
    if search.status in ("running", "paused"):
        state |= {"status": "interrupted", "status_reason": "copied while it was run"}
    other = there.execute(select(searches).where((s.id == search.id) | (s.name == search.name))).first()
    if other is None:
        insert_all(there, searches, [{**row, **state}])
        insert_all(there, search_tasks, [task._asdict() for task in _rows(here, search_tasks, search)])
        happened = [event._asdict() for event in _rows(here, events, search)]
        insert_all(there, leases, [{**free_lease(search.id), "events": len(happened)}])
        insert_all(there, events, happened)
        return
    if (other.id, other.config_hash) != (search.id, search.config_hash):
        raise StoreError(f"the store to copy to has another search {search.name}; rename or prune one of them")
    fence(there, search.id)
    if row["updated_at"] > other.updated_at:
        there.execute(update(searches).where(s.id == search.id).values(state))


def _copy_individuals(here: Connection, there: Connection, search: SearchRecord) -> int:
    """Copy a search's individuals with their evaluations, and the full model's; return the number of outcomes."""
    i = individuals.c
    ids = context_ids(here, search.model_fingerprint, search.engine_fingerprint)
    write_evaluations(there, read_evaluations(here, ids, [FULL_MODEL]))
    open_there = select(i.idx).where(i.search_id == search.id, i.status == "pending")
    pending = set(there.execute(open_there).scalars())
    decided = 0
    indices = here.execute(select(i.idx).where(i.search_id == search.id).order_by(i.idx)).scalars().all()
    for start in range(0, len(indices), CHUNK):
        page = read_history(here, search.id, indices[start : start + CHUNK])
        decided += sum(one.index in pending for one in write_individuals(there, search.id, page))
        phenotypes = sorted({one.phenotype_hash for one in page})
        write_evaluations(there, read_evaluations(here, ids, phenotypes))
    return decided
