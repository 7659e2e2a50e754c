"""Copies whole searches from one store to another, between databases of any kind.

Rows are matched by their natural key. Rows that the target lacks are added; others must be equal, except that an
individual may be pending in one store and decided in the other. So a copy can be repeated, and brought up to date.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Row, RowMapping, Table, select, update

from moevolve.store.errors import StoreError
from moevolve.store.leases import fence, free_lease
from moevolve.store.lineage import find_search
from moevolve.store.reader import StoreReader
from moevolve.store.records import FULL_MODEL
from moevolve.store.repository import Store
from moevolve.store.session import CHUNK, chunks, insert_all, lock_against_prune
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
from moevolve.store.upkeep.prune import CalibrationsOf

_SAME_SEARCH = ("name", "config_hash", "model_fingerprint", "engine_fingerprint", "seed", "genome_kind")
_SAME_EVALUATION = (
    *("score", "gold_logprob", "outcomes", "examples_seen", "failure"),
    *("experts", "active", "parameters", "active_parameters"),
)
_DECIDED = ("status", "fitness", "tie_break", "failure", "failure_kind")
_SAME_INDIVIDUAL = tuple(column.name for column in individuals.c if column.name not in (*_DECIDED, "created_at"))


@dataclass(frozen=True, slots=True)
class CopyReport:
    """Numbers of rows that a copy added to the target; rows that existed there are not counted.

    Attributes:
        searches: Names of all searches that were asked for.
        decided: Number of individuals that were pending in the target and now have an outcome.
    """

    searches: tuple[str, ...]
    individuals: int
    decided: int
    evaluations: int
    calibrations: int
    exports: int


def copy(
    source: StoreReader,
    target: Store,
    names: Sequence[str],
    calibrations_of: CalibrationsOf,
) -> CopyReport:
    """Copies searches with all that belongs to them, in one transaction of the target.

    A running search is copied in its present state, and can be resumed in the target.

    Args:
        source: Store to copy from.
        target: Store to copy to.
        names: Names or ids of the searches.
        calibrations_of: Function that returns the calibrations a search needs.

    Raises:
        LeaseHeldError: One of the searches has a driver in the target.
        StoreError: There is no such search, or the target has another search of that name or a different row with the
            same key. Nothing was copied.
    """
    fingerprints = {name: calibrations_of(source.search(name)) for name in dict.fromkeys(names)}
    # The source's transaction ends before the target's: if it fails, nothing is committed.
    with target.write_transaction(bounded=False) as there, source.transaction() as here:
        lock_against_prune(there)
        copies = [_Copy(here, there, name) for name in fingerprints]
        for each, needed in zip(copies, fingerprints.values(), strict=True):
            each.run(needed)
    totals = {
        table.name: sum(each.added[table.name] for each in copies)
        for table in (individuals, evaluations, calibrations, exports)
    }
    copied = tuple(each.search.name for each in copies)
    return CopyReport(copied, decided=sum(each.decided for each in copies), **totals)


class _Copy:
    """The copy of one search."""

    def __init__(self, here: Connection, there: Connection, name: str) -> None:
        self._here, self._there = here, there
        self.search = find_search(here, name)
        self.added = dict.fromkeys((individuals.name, evaluations.name, calibrations.name, exports.name), 0)
        self.decided = 0

    def run(self, calibrations_needed: Collection[str]) -> None:
        self._copy_search()
        for fingerprint in sorted(calibrations_needed):
            self._merge(calibrations, {"fingerprint": fingerprint}, ("content",))
        pairs = [(context.id, self._context(context)) for context in self._contexts()]
        self._copy_evaluations(pairs, [FULL_MODEL])
        for page in _pages(self._here, self.search.id):
            self._copy_individuals(page)
            hashes = sorted({row.phenotype_hash for row in page})
            for some in chunks(hashes):
                self._copy_evaluations(pairs, some)
        for row in self._rows(exports):
            key = {name: row[name] for name in ("search_id", "idx", "path")}
            self._merge(exports, key, ("form", "checks"), without="id")

    def _rows(self, table: Table) -> Iterator[RowMapping]:
        query = select(table).where(table.c.search_id == self.search.id)
        yield from self._here.execute(query).mappings()

    def _copy_search(self) -> None:
        s = searches.c
        row = self._here.execute(select(searches).where(s.id == self.search.id)).mappings().one()
        same = (s.id == self.search.id) | (s.name == self.search.name)
        other = self._there.execute(select(searches).where(same)).mappings().first()
        state = {name: row[name] for name in ("status", "status_reason", "winner", "updated_at")}
        if row["status"] in ("running", "paused"):
            state |= {"status": "interrupted", "status_reason": "copied while it was run"}
        if other is None:
            insert_all(self._there, searches, [{**row, **state}])
            insert_all(self._there, search_tasks, [dict(task) for task in self._rows(search_tasks)])
            happened = [dict(event) for event in self._rows(events)]
            insert_all(self._there, leases, [{**free_lease(self.search.id), "events": len(happened)}])
            insert_all(self._there, events, happened)
            return
        if other["id"] != row["id"]:
            raise StoreError(f"there is another search {self.search.name} where this one is to be copied to")
        self._refuse_other("search", self.search.name, _differing(row, other, _SAME_SEARCH))
        fence(self._there, self.search.id)
        if row["updated_at"] > other["updated_at"]:
            self._there.execute(update(searches).where(s.id == self.search.id).values(state))

    def _contexts(self) -> Sequence[Row[Any]]:
        c, search = contexts.c, self.search
        mine = (c.model_fingerprint == search.model_fingerprint, c.engine_fingerprint == search.engine_fingerprint)
        return self._here.execute(select(contexts).where(*mine).order_by(c.id)).all()

    def _context(self, row: Row[Any]) -> int:
        """Copies a context if the target lacks it; returns its id in the target."""
        names = ("model_fingerprint", "engine_fingerprint", "task_fingerprint")
        key = {name: row._mapping[name] for name in names}
        self._merge(contexts, key, ("task", "split", "metric"), without="id")
        match = [contexts.c[name] == value for name, value in key.items()]
        return int(self._there.execute(select(contexts.c.id).where(*match)).scalar_one())

    def _merge(self, table: Table, key: Mapping[str, Any], same: Sequence[str], without: str | None = None) -> None:
        """Copies the row with a key, if there is one, or checks that the target's row has the same values in `same`."""
        query = select(table).where(*(table.c[name] == value for name, value in key.items()))
        mine, other = (connection.execute(query).mappings().first() for connection in (self._here, self._there))
        if mine is not None and other is not None:
            self._refuse_other(table.name, ", ".join(map(str, key.values())), _differing(mine, other, same))
        elif mine is not None:
            insert_all(self._there, table, [{name: value for name, value in mine.items() if name != without}])
            if table.name in self.added:
                self.added[table.name] += 1

    def _copy_individuals(self, page: Sequence[Row[Any]]) -> None:
        i = individuals.c
        mine = (i.search_id == self.search.id, i.idx >= page[0].idx, i.idx <= page[-1].idx)
        known = {row.idx: row for row in self._there.execute(select(individuals).where(*mine))}
        for row in page:
            if row.idx in known:
                self._decide(row, known[row.idx])
        insert_all(self._there, individuals, [dict(row._mapping) for row in page if row.idx not in known])
        self.added[individuals.name] += len(page) - len(known.keys() & {row.idx for row in page})
        given = _edges(self._here, page)
        insert_all(self._there, parents, [dict(edge._mapping) for edge in given if edge.child_idx not in known])
        theirs = set(map(tuple, _edges(self._there, page)))
        changed = [edge.child_idx for edge in given if tuple(edge) not in theirs]
        self._refuse_other("individual", f"{self.search.name}:{changed[:1]}", ["parents"] if changed else [])

    def _decide(self, row: Row[Any], other: Row[Any]) -> None:
        where = f"{self.search.name}:{row.idx}"
        self._refuse_other("individual", where, _differing(row._mapping, other._mapping, _SAME_INDIVIDUAL))
        if "pending" not in (row.status, other.status):
            self._refuse_other("individual", where, _differing(row._mapping, other._mapping, _DECIDED))
        elif row.status != "pending":
            i = individuals.c
            change = update(individuals).where(i.search_id == self.search.id, i.idx == row.idx)
            self._there.execute(change.values({name: row._mapping[name] for name in _DECIDED}))
            self.decided += 1

    def _copy_evaluations(self, pairs: Sequence[tuple[int, int]], hashes: Sequence[str]) -> None:
        for mine, theirs in pairs:
            found = _evaluations_of(self._here, mine, hashes)
            known = _evaluations_of(self._there, theirs, hashes)
            for phenotype, row in known.items():
                if phenotype in found:
                    differing = _differing(found[phenotype]._mapping, row._mapping, _SAME_EVALUATION)
                    self._refuse_other("evaluation of phenotype", phenotype, differing)
            rows = [{**row._mapping, "context_id": theirs} for key, row in found.items() if key not in known]
            insert_all(self._there, evaluations, rows)
            self.added[evaluations.name] += len(rows)

    def _refuse_other(self, kind: str, name: str, differing: Sequence[str]) -> None:
        if differing:
            raise StoreError(
                f"{kind} {name} is in both stores, and differs in {', '.join(differing)}: search {self.search.name} "
                "can't be copied there"
            )


def _differing(one: RowMapping, other: RowMapping, names: Sequence[str]) -> list[str]:
    return [name for name in names if one[name] != other[name]]


def _pages(connection: Connection, search_id: str) -> Iterator[Sequence[Row[Any]]]:
    """A search's individuals sorted by index, `CHUNK` rows at a time."""
    query = select(individuals).where(individuals.c.search_id == search_id).order_by(individuals.c.idx).limit(CHUNK)
    page = connection.execute(query).all()
    while page:
        yield page
        page = connection.execute(query.where(individuals.c.idx > page[-1].idx)).all()


def _edges(connection: Connection, page: Sequence[Row[Any]]) -> Sequence[Row[Any]]:
    """The rows of `parents` for a page of individuals, sorted by child and position."""
    p = parents.c
    own = (p.search_id == page[0].search_id, p.child_idx >= page[0].idx, p.child_idx <= page[-1].idx)
    return connection.execute(select(parents).where(*own).order_by(p.child_idx, p.position)).all()


def _evaluations_of(connection: Connection, context_id: int, hashes: Sequence[str]) -> Mapping[str, Row[Any]]:
    """The evaluations of at most `CHUNK` phenotypes in a context, by phenotype hash."""
    e = evaluations.c
    query = select(evaluations).where(e.context_id == context_id, e.phenotype_hash.in_(hashes))
    return {row.phenotype_hash: row for row in connection.execute(query)}
