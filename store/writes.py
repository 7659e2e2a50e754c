"""Writes of individuals, evaluations and exports, within a transaction of `Store`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, get_args

from sqlalchemy import Connection, bindparam, delete, select, update

from moevolve.store.errors import StoreError
from moevolve.store.leases import fence
from moevolve.store.records import (
    INDIVIDUAL_COLUMNS,
    EvaluationRecord,
    ExportRecord,
    FailureKind,
    IndividualRecord,
    Lease,
)
from moevolve.store.session import chunks, insert_all, insert_new, update_all
from moevolve.store.tables import contexts, evaluations, exports, individuals, parents, searches

ContextKey = tuple[str, str, str, str, str, str]
"""Fingerprints of model, engine and task split, followed by task, split and metric."""
_INTEGER_COLUMNS = ("experts", "active", "parameters", "active_parameters", "parameters_full", "depth")
_DECIDED = ("status", "fitness", "tie_break", "failure", "failure_kind")
_DECIDE = (
    update(individuals)
    .where(individuals.c.search_id == bindparam("of_search"), individuals.c.idx == bindparam("at"))
    .values({name: bindparam(name) for name in _DECIDED})
)


def utc_now() -> datetime:
    """The current time as an aware UTC datetime."""
    return datetime.now(UTC)


def touch(connection: Connection, writer: str | Lease) -> str:
    """Checks that `writer` may write to its search (`leases.fence`), updates the search's time, and returns its id."""
    search_id = fence(connection, writer)
    connection.execute(update(searches).where(searches.c.id == search_id).values(updated_at=utc_now()))
    return search_id


def write_individuals(
    connection: Connection, search_id: str, batch: Sequence[IndividualRecord]
) -> list[IndividualRecord]:
    """Adds the new individuals with their parents, and stores the outcomes of those that were pending.

    Returns:
        The individuals whose outcome is new.

    Raises:
        StoreError: The same cases as `Store.record`.
    """
    given = _by_index(search_id, batch)
    stored = _stored(connection, search_id, sorted(given))
    for one in given.values():
        if one.index in stored:
            _check_same(search_id, stored[one.index], one)
    fresh = {index: one for index, one in given.items() if index not in stored}
    _check_parents(connection, search_id, fresh)
    now = utc_now()
    insert_all(connection, individuals, [_individual_row(search_id, one, now) for one in fresh.values()])
    edges = [
        {"search_id": search_id, "child_idx": one.index, "position": position, "parent_idx": int(parent)}
        for one in fresh.values()
        for position, parent in enumerate(one.parents)
    ]
    insert_all(connection, parents, edges)
    _decide(connection, search_id, [one for one in given.values() if one.index in stored], stored)
    return [
        one
        for one in given.values()
        if one.status != "pending" and (one.index in fresh or stored[one.index].status == "pending")
    ]


def _by_index(search_id: str, batch: Sequence[IndividualRecord]) -> dict[int, IndividualRecord]:
    """The records of a batch by index, checked; of a pending and a decided record of one individual, the latter."""
    given: dict[int, IndividualRecord] = {}
    for one in map(_checked, batch):
        before = given.setdefault(one.index, one)
        _check_same(search_id, before, one)
        if before.status == "pending":
            given[one.index] = one
        elif one.status != "pending" and _contradict(before, one):
            raise StoreError(f"fitness of individual {one.index} is given twice, and differently")
    return given


def _check_same(search_id: str, there: Any, one: IndividualRecord) -> None:
    if (there.content_hash, there.phenotype_hash) != (one.content_hash, one.phenotype_hash):
        raise StoreError(
            f"individual {one.index} of search {search_id} is already recorded with another genome; "
            "two drivers on one search, or another version of the software?"
        )


def _stored(connection: Connection, search_id: str, indices: Sequence[int]) -> dict[int, Any]:
    """The stored rows (hashes, status, fitness) among these indices."""
    columns = [
        individuals.c[name] for name in ("idx", "content_hash", "phenotype_hash", "status", "fitness", "tie_break")
    ]
    found: dict[int, Any] = {}
    for some in chunks(indices):
        query = select(*columns).where(individuals.c.search_id == search_id, individuals.c.idx.in_(some))
        found.update((row.idx, row) for row in connection.execute(query))
    return found


def _check_parents(connection: Connection, search_id: str, fresh: Mapping[int, IndividualRecord]) -> None:
    wanted: set[int] = set()
    for one in fresh.values():
        late = [parent for parent in one.parents if parent >= one.index]
        if late or one.index < 0:
            raise StoreError(f"individual {one.index} of search {search_id}: parents {late} must have smaller indices")
        wanted.update(one.parents)
    outside = sorted(wanted - fresh.keys())
    known: set[int] = set()
    for some in chunks(outside):
        query = select(individuals.c.idx).where(individuals.c.search_id == search_id, individuals.c.idx.in_(some))
        known.update(connection.execute(query).scalars())
    missing = [parent for parent in outside if parent not in known]
    if missing:
        child = next(one.index for one in fresh.values() if missing[0] in one.parents)
        raise StoreError(f"parent {missing[0]} of individual {child} of search {search_id} is not recorded")


def _individual_row(search_id: str, one: IndividualRecord, now: datetime) -> dict[str, Any]:
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


def _checked(one: IndividualRecord) -> IndividualRecord:
    """The same record with plain floats.

    Raises:
        StoreError: Its status and its numbers contradict each other.
    """
    where = f"fitness of individual {one.index}"
    if one.status == "ok":
        score, tie = _numbers(where, one.fitness, one.tie_break)
        return replace(one, fitness=score, tie_break=tie)
    if one.fitness is not None or one.tie_break is not None or (one.status == "failed") != bool(one.failure):
        raise StoreError(f"{where}: it is pending, ok with numbers, or failed with a reason and none; got {one}")
    if one.status == "failed" and one.failure_kind not in get_args(FailureKind):
        raise StoreError(f"{where}: it failed, but by whose fault? got {one.failure_kind!r}")
    return one


def _contradict(first: Any, second: IndividualRecord) -> bool:
    return (first.status, first.fitness, first.tie_break) != (second.status, second.fitness, second.tie_break)


def _decide(
    connection: Connection, search_id: str, known: Sequence[IndividualRecord], stored: Mapping[int, Any]
) -> None:
    changes = []
    for one in known:
        row = stored[one.index]
        if one.status == "pending":
            continue
        if row.status == "pending":
            values = {name: getattr(one, name) for name in _DECIDED}
            changes.append({"of_search": search_id, "at": int(one.index), **values})
        elif _contradict(row, one):
            raise StoreError(
                f"individual {one.index} of search {search_id} already is {row.status} with fitness {row.fitness}; "
                f"refusing {one.status} with {one.fitness}"
            )
    update_all(connection, _DECIDE, changes)


def write_evaluations(
    connection: Connection, batch: Sequence[EvaluationRecord], cache: Mapping[ContextKey, int]
) -> dict[ContextKey, int]:
    """Adds the new evaluations.

    Args:
        connection: The transaction.
        batch: Evaluations, new or already stored.
        cache: Ids of committed contexts.

    Returns:
        Ids of the contexts that were not in the cache, to be added to it after the commit.
    """
    added = _new_contexts(connection, batch, cache)
    ids = {**cache, **added}
    now = utc_now()
    insert_new(connection, evaluations, [_evaluation_row(one, ids, now) for one in batch])
    return added


def _new_contexts(
    connection: Connection, batch: Sequence[EvaluationRecord], cache: Mapping[ContextKey, int]
) -> dict[ContextKey, int]:
    keys: dict[ContextKey, EvaluationRecord] = {}
    for one in batch:
        keys.setdefault(_key(one), one)
    return {key: _context_id(connection, one) for key, one in keys.items() if key not in cache}


def _key(one: EvaluationRecord) -> ContextKey:
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


def _evaluation_row(one: EvaluationRecord, ids: Mapping[ContextKey, int], now: datetime) -> dict[str, Any]:
    score, gold = one.score, one.gold_logprob
    where = f"evaluation of {one.phenotype_hash} on {one.task}/{one.split}"
    if one.failure is None:
        score, gold = _numbers(where, score, gold)
    elif score is not None or gold is not None or not one.failure:
        raise StoreError(f"{where}: a failure has a reason and no score")
    return {
        "context_id": ids[_key(one)],
        "phenotype_hash": one.phenotype_hash,
        "score": score,
        "gold_logprob": gold,
        "outcomes": None if one.outcomes is None else bytes(one.outcomes),
        "examples_seen": int(one.examples_seen),
        "failure": one.failure,
        "seconds": float(one.seconds),
        "worker": one.worker,
        "attempt": int(one.attempt),
        **{name: _whole(getattr(one, name)) for name in ("experts", "active", "parameters", "active_parameters")},
        "created_at": one.created_at or now,
    }


def _whole(value: int | None) -> int | None:
    return None if value is None else int(value)


def _numbers(where: str, score: float | None, tie: float | None) -> tuple[float, float]:
    """Both as plain floats, checked."""
    # A tie-break may be -inf (an impossible answer). NaN would be sorted differently by each backend.
    if score is None or tie is None or not math.isfinite(score) or math.isnan(tie) or tie == math.inf:
        raise StoreError(f"{where}: needs a finite score and a log-probability, got {score} and {tie}")
    return float(score), float(tie)


def write_export(connection: Connection, search_id: str, idx: int, export: ExportRecord) -> None:
    """Records an export, replacing an earlier one of the same individual to the same path."""
    e = exports.c
    connection.execute(delete(exports).where(e.search_id == search_id, e.idx == idx, e.path == export.path))
    row = {"search_id": search_id, "idx": idx, "path": export.path, "form": export.form, "checks": export.checks}
    insert_all(connection, exports, [{**row, "created_at": export.created_at or utc_now()}])


def write_retry(connection: Connection, search_id: str, first: int) -> None:
    """Takes a search back to before failures that were not the candidates' fault; see `Store.retry`."""
    i, p, e = individuals.c, parents.c, exports.c
    connection.execute(delete(parents).where(p.search_id == search_id, p.child_idx >= first))
    connection.execute(delete(exports).where(e.search_id == search_id, e.idx >= first))
    connection.execute(delete(individuals).where(i.search_id == search_id, i.idx >= first))
    blameless = (i.search_id == search_id, i.status == "failed", i.failure_kind != "candidate")
    again = {"status": "pending", "failure": None, "failure_kind": None}
    connection.execute(update(individuals).where(*blameless).values(again))
