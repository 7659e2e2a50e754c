"""Writes of individuals, evaluations, exports and shrinks, within a transaction of `Store`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import Connection, Row, bindparam, delete, select, update

from moevolve.store.errors import StoreError
from moevolve.store.leases import fence
from moevolve.store.records import (
    INDIVIDUAL_COLUMNS,
    EvaluationRecord,
    ExportRecord,
    IndividualRecord,
    Lease,
    StoredShrink,
)
from moevolve.store.session import chunks, insert_all, insert_new, update_all
from moevolve.store.tables import contexts, evaluations, exports, individuals, parents, searches, shrinks

# Fingerprints of model, engine and task split, followed by task, split and metric.
_Context = tuple[str, str, str, str, str, str]
# Numbers may be NumPy's, which drivers of databases don't take.
_SIZES = ("experts", "active", "parameters", "active_parameters")
_INTEGER_COLUMNS = (*_SIZES, "parameters_full", "active_parameters_full", "depth")
_DECIDED = ("status", "fitness", "tie_break", "failure", "failure_kind")
# Parameters of an update can't have the names of columns: those are what `values` sets.
_DECIDE = (
    update(individuals)
    .where(individuals.c.search_id == bindparam("of_search"), individuals.c.idx == bindparam("at"))
    .values({name: bindparam(name) for name in _DECIDED})
)


def utc_now() -> datetime:
    """Return the current time as an aware UTC datetime."""
    return datetime.now(UTC)


def touch(connection: Connection, writer: str | Lease) -> str:
    """Check that `writer` may write to its search (`leases.fence`), update the search's time, and return its id."""
    search_id = fence(connection, writer)
    connection.execute(update(searches).where(searches.c.id == search_id).values(updated_at=utc_now()))
    return search_id


def write_individuals(
    connection: Connection, search_id: str, batch: Sequence[IndividualRecord]
) -> list[IndividualRecord]:
    """Add the new individuals with their parents, and stores the outcomes of those that were pending.

    A batch may have an individual twice, first pending and then with its outcome.

    Returns:
        The individuals whose outcome is new.

    Raises:
        StoreError: The same cases as `Store.record`.
    """
    known = _stored(connection, search_id, sorted({one.index for one in batch}))
    fresh: list[int] = []
    decided: dict[int, IndividualRecord] = {}
    for one in map(_with_plain_numbers, batch):
        before = known.get(one.index)
        if before is None:
            fresh.append(one.index)
        else:
            _check_same(search_id, before, one)
        if before is None or before.status == "pending":
            known[one.index] = one
            if one.status != "pending":
                decided[one.index] = one
    now = utc_now()
    insert_all(connection, individuals, [_individual_row(search_id, known[index], now) for index in fresh])
    edges = [
        {"search_id": search_id, "child_idx": index, "position": position, "parent_idx": int(parent)}
        for index in fresh
        for position, parent in enumerate(known[index].parents)
    ]
    insert_all(connection, parents, edges)
    changes = [
        {"of_search": search_id, "at": index, **{name: getattr(one, name) for name in _DECIDED}}
        for index, one in decided.items()
        if index not in fresh
    ]
    update_all(connection, _DECIDE, changes)
    return list(decided.values())


def _check_same(search_id: str, there: Row[*tuple[object, ...]], one: IndividualRecord) -> None:
    """Refuse a record of an individual that is known already, if it has another genome or another outcome."""
    if (there.content_hash, there.phenotype_hash) != (one.content_hash, one.phenotype_hash):
        raise StoreError(
            f"individual {one.index} of search {search_id} is already recorded with another genome; "
            "two drivers on one search, or another version of the software?"
        )
    outcomes = [(each.status, each.fitness, each.tie_break) for each in (there, one)]
    if "pending" not in (there.status, one.status) and outcomes[0] != outcomes[1]:
        raise StoreError(
            f"individual {one.index} of search {search_id} already is {there.status} with fitness {there.fitness}; "
            f"refusing {one.status} with {one.fitness}"
        )


def _stored(connection: Connection, search_id: str, indices: Sequence[int]) -> dict[int, Any]:
    """Return the stored rows (hashes and outcome) among these indices."""
    names = ("idx", "content_hash", "phenotype_hash", "status", "fitness", "tie_break")
    found: dict[int, Any] = {}
    for some in chunks(indices):
        query = select(*(individuals.c[name] for name in names))
        query = query.where(individuals.c.search_id == search_id, individuals.c.idx.in_(some))
        found.update((row.idx, row) for row in connection.execute(query))
    return found


def _individual_row(search_id: str, one: IndividualRecord, now: datetime) -> dict[str, object]:
    values = {name: getattr(one, name) for name in INDIVIDUAL_COLUMNS}
    whole = {name: int(values[name]) for name in _INTEGER_COLUMNS}
    return {
        **values,
        **whole,
        "search_id": search_id,
        "idx": int(one.index),
        "genome": bytes(one.genome),
        "created_at": one.created_at or now,
    }


def _with_plain_numbers(one: IndividualRecord) -> IndividualRecord:
    if one.status != "ok":
        return one
    score, tie = _numbers(f"fitness of individual {one.index}", one.fitness, one.tie_break)
    return replace(one, index=int(one.index), fitness=score, tie_break=tie)


def write_evaluations(connection: Connection, batch: Sequence[EvaluationRecord]) -> None:
    """Add evaluations, which belong to no search and so need no lease. Those that are stored already stay."""
    ids: dict[_Context, int] = {}
    for one in batch:
        if _key(one) not in ids:
            ids[_key(one)] = _context_id(connection, one)
    now = utc_now()
    insert_new(connection, evaluations, [_evaluation_row(one, ids[_key(one)], now) for one in batch])


def _key(one: EvaluationRecord) -> _Context:
    return one.model_fingerprint, one.engine_fingerprint, one.task_fingerprint, one.task, one.split, one.metric


def _context_id(connection: Connection, one: EvaluationRecord) -> int:
    key = {name: getattr(one, name) for name in ("model_fingerprint", "engine_fingerprint", "task_fingerprint")}
    query = select(contexts).where(*(contexts.c[name] == value for name, value in key.items()))
    row = connection.execute(query).first()
    if row is None:
        insert_new(connection, contexts, [{**key, "task": one.task, "split": one.split, "metric": one.metric}])
        row = connection.execute(query).one()
    if (row.task, row.split, row.metric) != (one.task, one.split, one.metric):
        raise StoreError(
            f"task fingerprint {one.task_fingerprint} stands for {row.task}/{row.split} by {row.metric}, "
            f"not {one.task}/{one.split} by {one.metric}"
        )
    return int(row.id)


def _evaluation_row(one: EvaluationRecord, context_id: int, now: datetime) -> dict[str, object]:
    score, gold = one.score, one.gold_logprob
    if one.failure is None:
        score, gold = _numbers(f"evaluation of {one.phenotype_hash} on {one.task}/{one.split}", score, gold)
    return {
        "context_id": context_id,
        "phenotype_hash": one.phenotype_hash,
        "score": score,
        "gold_logprob": gold,
        "outcomes": None if one.outcomes is None else bytes(one.outcomes),
        "examples_seen": int(one.examples_seen),
        "failure": one.failure,
        "seconds": float(one.seconds),
        "worker": one.worker,
        "attempt": int(one.attempt),
        **{name: None if (size := getattr(one, name)) is None else int(size) for name in _SIZES},
        "created_at": one.created_at or now,
    }


def _numbers(where: str, score: float | None, tie: float | None) -> tuple[float, float]:
    """Return both as plain floats, checked."""
    # A tie-break may be -inf (an impossible answer). NaN would be sorted differently by each backend.
    if score is None or tie is None or not math.isfinite(score) or math.isnan(tie) or tie == math.inf:
        raise StoreError(f"{where}: needs a finite score and a log-probability, got {score} and {tie}")
    return float(score), float(tie)


def write_export(connection: Connection, search_id: str, idx: int, export: ExportRecord) -> None:
    """Record an export, replacing an earlier one of the same individual to the same path."""
    e = exports.c
    connection.execute(delete(exports).where(e.search_id == search_id, e.idx == idx, e.path == export.path))
    row = {"search_id": search_id, "idx": idx, "path": export.path, "form": export.form, "checks": export.checks}
    insert_all(connection, exports, [{**row, "created_at": export.created_at or utc_now()}])


def write_shrink(connection: Connection, shrink: StoredShrink) -> None:
    """Record the state of a shrink; replaces its earlier state."""
    connection.execute(delete(shrinks).where(shrinks.c.name == shrink.name))
    row = {"name": shrink.name, "searches": shrink.searches, "content": shrink.content}
    insert_all(connection, shrinks, [{**row, "updated_at": shrink.updated_at or utc_now()}])


def write_retry(connection: Connection, search_id: str, first: int) -> None:
    """Take a search back to before failures that were not the candidates' fault; see `Store.retry`."""
    i, p, e = individuals.c, parents.c, exports.c
    connection.execute(delete(parents).where(p.search_id == search_id, p.child_idx >= first))
    connection.execute(delete(exports).where(e.search_id == search_id, e.idx >= first))
    connection.execute(delete(individuals).where(i.search_id == search_id, i.idx >= first))
    blameless = (i.search_id == search_id, i.status == "failed", i.failure_kind != "candidate")
    again = {"status": "pending", "failure": None, "failure_kind": None}
    connection.execute(update(individuals).where(*blameless).values(again))
