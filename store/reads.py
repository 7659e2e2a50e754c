"""Plain reads: histories, individuals, evaluations, exports and the listing of searches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from sqlalchemy import Connection, Row, func, select

from moevolve.store.models import contexts, evaluations, exports, individuals, parents, search_tasks, searches
from moevolve.store.records import (
    EvaluationRecord,
    ExportRecord,
    FitnessRecord,
    HistoryRow,
    IndividualDetail,
    IndividualRecord,
    SearchRecord,
    SearchSummary,
)
from moevolve.store.refs import find_individual
from moevolve.store.session import chunks

_SPLIT_ORDER = {"search": 0, "dev": 1, "test": 2}
# Attributes of an `IndividualRecord` that are columns of the same name.
_INDIVIDUAL = tuple(one.name for one in fields(IndividualRecord) if one.name not in ("index", "parents"))


def read_searches(connection: Connection) -> list[SearchSummary]:
    """All searches with their counts, oldest first."""
    s, i, t = searches.c, individuals.c, search_tasks.c
    query = select(searches).order_by(s.created_at, s.id)
    found = [SearchRecord(**row._mapping) for row in connection.execute(query)]
    counted = select(i.search_id, i.status, func.count(), func.max(i.fitness)).group_by(i.search_id, i.status)
    counts = {(row[0], row[1]): (row[2], row[3]) for row in connection.execute(counted)}
    tasks: dict[str, dict[str, None]] = {one.id: {} for one in found}
    for search_id, task in connection.execute(
        select(t.search_id, t.task).where(t.weight > 0).order_by(t.search_id, t.position)
    ):
        tasks[search_id][task] = None
    return [_summary(one, counts, tuple(tasks[one.id])) for one in found]


def _summary(
    search: SearchRecord, counts: dict[tuple[str, str], tuple[int, float | None]], tasks: tuple[str, ...]
) -> SearchSummary:
    ok, failed, pending = (counts.get((search.id, status), (0, None)) for status in ("ok", "failed", "pending"))
    return SearchSummary(search, ok[0] + failed[0] + pending[0], ok[0], failed[0], ok[1], tasks)


def read_history(connection: Connection, search_id: str, indices: Sequence[int] | None = None) -> list[HistoryRow]:
    """All individuals of a search, or those of some indices, by index."""
    if indices is not None:
        return [row for some in chunks(sorted(indices)) for row in _history(connection, search_id, some)]
    return _history(connection, search_id, None)


def _history(connection: Connection, search_id: str, indices: Sequence[int] | None) -> list[HistoryRow]:
    i, p = individuals.c, parents.c
    edges = select(p.child_idx, p.parent_idx).where(p.search_id == search_id).order_by(p.child_idx, p.position)
    first = (i.idx, i.phase, i.operator, i.genome, i.content_hash, i.phenotype_hash, i.depth)
    last = (i.status, i.fitness, i.tie_break, i.failure, i.failure_kind)
    query = select(*first, *last).where(i.search_id == search_id).order_by(i.idx)
    if indices is not None:
        edges, query = edges.where(p.child_idx.in_(indices)), query.where(i.idx.in_(indices))
    of: dict[int, list[int]] = {}
    for child, parent in connection.execute(edges):
        of.setdefault(child, []).append(parent)
    return [HistoryRow(*row[:7], tuple(of.get(row[0], ())), *row[7:]) for row in connection.execute(query)]


def read_individual(connection: Connection, ref: str) -> IndividualDetail:
    """All about the individual `ref`; see `Store.individual`."""
    search, row = find_individual(connection, ref)
    p = parents.c
    edges = select(p.parent_idx).where(p.search_id == search.id, p.child_idx == row.idx).order_by(p.position)
    individual = IndividualRecord(
        index=row.idx,
        parents=tuple(connection.execute(edges).scalars()),
        **{name: getattr(row, name) for name in _INDIVIDUAL},
    )
    c = contexts.c
    ids = select(c.id).where(
        c.model_fingerprint == search.model_fingerprint, c.engine_fingerprint == search.engine_fingerprint
    )
    here = list(connection.execute(ids).scalars())
    found = read_evaluations(connection, here, [row.phenotype_hash])
    found.sort(key=lambda one: (one.task, _SPLIT_ORDER[one.split], one.task_fingerprint))
    return IndividualDetail(
        search=search,
        individual=individual,
        fitness=FitnessRecord(row.idx, row.status, row.fitness, row.tie_break, row.failure, row.failure_kind),
        evaluations=tuple(found),
        exports=tuple(read_exports(connection, search.id, row.idx)),
    )


def context_ids(connection: Connection, model: str, engine: str, task_fingerprints: Sequence[str]) -> list[int]:
    """Ids of the contexts of a model and an engine (fingerprints) on some task splits."""
    c = contexts.c
    found: list[int] = []
    for some in chunks(sorted(set(task_fingerprints))):
        query = select(c.id).where(c.model_fingerprint == model, c.engine_fingerprint == engine)
        found += connection.execute(query.where(c.task_fingerprint.in_(some))).scalars()
    return found


def read_evaluations(
    connection: Connection, context_ids: Sequence[int], hashes: Sequence[str]
) -> list[EvaluationRecord]:
    """The evaluations of some phenotypes in some contexts, by phenotype hash and task fingerprint."""
    found: list[EvaluationRecord] = []
    e = evaluations.c
    for some in chunks(context_ids):
        about = {row.id: row for row in connection.execute(select(contexts).where(contexts.c.id.in_(some)))}
        for context_id in some:
            for few in chunks(hashes):
                query = select(evaluations).where(e.context_id == context_id, e.phenotype_hash.in_(few))
                found += [_evaluation(row, about[context_id]) for row in connection.execute(query)]
    found.sort(key=lambda one: (one.phenotype_hash, one.task_fingerprint))
    return found


def _evaluation(row: Row[Any], context: Row[Any]) -> EvaluationRecord:
    values = dict(row._mapping) | dict(context._mapping)
    del values["context_id"], values["id"]
    return EvaluationRecord(**values)


def read_exports(connection: Connection, search_id: str, idx: int) -> list[ExportRecord]:
    """The exports of an individual, oldest first."""
    e = exports.c
    query = select(e.path, e.form, e.checks, e.created_at).where(e.search_id == search_id, e.idx == idx)
    return [ExportRecord(*row) for row in connection.execute(query.order_by(e.created_at, e.id))]
