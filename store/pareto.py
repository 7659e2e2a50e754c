"""Scores against sizes: Pareto fronts, and the full model's score to compare them with."""

from __future__ import annotations

from typing import Literal

from sqlalchemy import Connection, func, select

from moevolve.evaluators.types import SCORED, Split
from moevolve.store.errors import StoreError
from moevolve.store.queries import Filter, StoredRow, find_named, task_contexts, top
from moevolve.store.records import FULL_MODEL, BestRow, SearchRecord
from moevolve.store.tables import evaluations

# Parameters of the whole model, or those that a token uses.
Size = Literal["parameters", "active_parameters"]


def read_front(
    connection: Connection,
    task: str,
    split: Split = "search",
    search: str | None = None,
    size: Size = "parameters",
    model: str | None = None,
) -> list[BestRow]:
    """Return the Pareto front of score against parameters, or those used per token, from the smallest model on.

    If they are given, only of one search, and of the models that searches have by the path `model`; so in all of these.
    """
    only = find_named(connection, search)
    here = _scored_contexts(connection, task, split, only, model)
    sizes = evaluations.c[size]
    tops: dict[int, float] = {}
    for context in here:
        if context.split == split:
            e = evaluations.c
            query = select(sizes, func.max(e.score)).where(
                e.context_id == context.id, e.score.is_not(None), sizes.is_not(None)
            )
            for value, score in connection.execute(query.group_by(sizes)):
                tops[value] = max(score, tops.get(value, score))
    found: list[BestRow] = []
    for value in sorted(tops):
        if not found or tops[value] > found[-1].score:
            rows = top(connection, here, split, Filter(search=only), 1, only=sizes == value)
            found += [row for row in rows if not found or row.score > found[-1].score]
    return found


def read_full_score(
    connection: Connection, task: str, split: Split = "search", search: str | None = None, model: str | None = None
) -> float | None:
    """Return the newest score of the full model on a split of a task; None if it isn't scored there."""
    here = _scored_contexts(connection, task, split, find_named(connection, search), model)
    ids = [context.id for context in here if context.split == split]
    e = evaluations.c
    query = select(e.score).where(e.context_id.in_(ids), e.phenotype_hash == FULL_MODEL, e.score.is_not(None))
    return connection.execute(query.order_by(e.context_id.desc()).limit(1)).scalar()


def _scored_contexts(
    connection: Connection, task: str, split: Split, search: SearchRecord | None, model: str | None
) -> list[StoredRow]:
    if split not in SCORED:
        raise StoreError(f"a Pareto front needs a split of {', '.join(SCORED)}, got {split!r}")
    return task_contexts(connection, task, search, model)
