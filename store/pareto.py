"""Scores against sizes: Pareto fronts, all candidates in cells of a chart, and marks to compare them with."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from operator import ge
from typing import Any, Literal

from pydantic import computed_field
from sqlalchemy import ColumnElement, Connection, Integer, and_, cast, func, select

from moevolve.evaluators.types import SCORED, Split
from moevolve.store.errors import StoreError
from moevolve.store.queries import Filter, find_named, task_contexts, top
from moevolve.store.records import FULL_MODEL, BestRow, SearchRecord
from moevolve.store.tables import evaluations, individuals, search_tasks, searches

Size = Literal["parameters", "active_parameters"]
# Cells of a chart along either axis.
_CELLS = 200
_SEARCHES, _EARLIEST = 20, 64
"""Newest searches that marks are taken from, and the number of their first individuals."""


def unbeaten(points: Sequence[tuple[float, ...]]) -> list[int]:
    """Return the places of the points that no other reaches in every number and exceeds in one; larger is better.

    Of equal points the first one stands for all. The largest first number comes first.
    """
    # In descending order a point can be beaten by earlier ones only, and by one that isn't beaten itself.
    order = sorted(range(len(points)), key=points.__getitem__, reverse=True)
    front: list[int] = []
    for place in order:
        # The latest ones are the nearest. Of two numbers the latest decides.
        if not any(all(map(ge, points[other], points[place])) for other in reversed(front)):
            front.append(place)
    return front


@dataclass(frozen=True, slots=True)
class FrontRow:
    """A configuration that no other one beats.

    Attributes:
        index: Index of the earliest individual with this phenotype.
        scores: Scores in [0, 1], one for each task of the front.
    """

    search_id: str
    search_name: str
    index: int
    scores: tuple[float, ...]
    experts: int
    active: int
    parameters: int
    active_parameters: int
    parameters_full: int
    active_parameters_full: int
    summary: str

    @computed_field  # type: ignore[prop-decorator]
    @property
    def ref(self) -> str:
        """The reference `name:index`, as the command line takes it."""
        return f"{self.search_name}:{self.index}"


@dataclass(frozen=True, slots=True)
class Mark:
    """A model that wasn't searched.

    Attributes:
        label: `full model`, or the operator that made it: `random`, or the name of a one-shot method.
        ref: The individual as SEARCH:INDEX; None for a full model.
        scores: Scores in [0, 1], one for each task of the front; None where it isn't scored.
        parameters, active_parameters: Its size; None where the store doesn't know it.
    """

    label: str
    ref: str | None
    scores: tuple[float | None, ...]
    parameters: int | None
    active_parameters: int | None


@dataclass(frozen=True, slots=True)
class ChartCell:
    """Candidates of about the same size and score, with their means."""

    size: float
    score: float
    candidates: int


def read_front(
    connection: Connection,
    task: str,
    split: Split = "search",
    search: str | None = None,
    size: Size = "parameters",
    model: str | None = None,
) -> list[BestRow]:
    """The Pareto front of score against parameters, or those used per token, from the smallest model on.

    If they are given, only of one search, and of the models that searches have by the path `model`; so in all of these.
    """
    only = find_named(connection, search)
    here = _scored_contexts(connection, task, split, only, model)
    sizes = evaluations.c[size]
    tops: dict[int, float] = {}
    for context in here:
        if context.split == split:
            query = select(sizes, func.max(evaluations.c.score)).where(*_sized(context, sizes)).group_by(sizes)
            for value, score in connection.execute(query):
                tops[value] = max(score, tops.get(value, score))
    found: list[BestRow] = []
    for value in sorted(tops):
        if not found or tops[value] > found[-1].score:
            rows = top(connection, here, split, Filter(search=only), 1, only=sizes == value)
            found += [row for row in rows if not found or row.score > found[-1].score]
    return found


def read_cells(
    connection: Connection,
    task: str,
    split: Split = "search",
    search: str | None = None,
    size: Size = "parameters",
    model: str | None = None,
) -> list[ChartCell]:
    """All scored candidates, counted in at most 200 x 200 cells of a chart of score against size."""
    only = find_named(connection, search)
    here = [one for one in _scored_contexts(connection, task, split, only, model) if one.split == split]
    sizes, scores = evaluations.c[size], evaluations.c.score
    ends: list[int] = []
    for context in here:
        for order in (sizes.asc(), sizes.desc()):  # each reads one entry of an index
            query = select(sizes).where(*_sized(context, sizes)).order_by(order).limit(1)
            ends += [end for end in connection.execute(query).scalars() if end is not None]
    low, high = min(ends, default=0), max(ends, default=0)
    counted: dict[tuple[int, int], list[float]] = {}
    for context in here:
        column = (sizes - low) * (_CELLS - 1) // max(1, high - low)
        row = cast(scores * _CELLS, Integer)
        query = select(column, row, func.avg(sizes), func.avg(scores), func.count()).where(*_sized(context, sizes))
        if only is not None:
            # From the search's own phenotypes: there may be many times as many evaluations of others.
            i = individuals.c
            own = select(i.phenotype_hash).where(i.search_id == only.id, i.status == "ok").distinct().subquery()
            query = query.select_from(own).join(evaluations, evaluations.c.phenotype_hash == own.c.phenotype_hash)
        for x, y, mean_size, mean_score, count in connection.execute(query.group_by(column, row)):
            cell = counted.setdefault((x, y), [0.0, 0.0, 0])
            for place, value in enumerate((float(mean_size) * count, mean_score * count, count)):
                cell[place] += value
    return [
        ChartCell(sizes_sum / count, scores_sum / count, int(count))
        for _, (sizes_sum, scores_sum, count) in sorted(counted.items())
    ]


def read_marks(
    connection: Connection,
    task: str,
    split: Split,
    search: str | None,
    operators: Collection[str],
    model: str | None = None,
) -> list[Mark]:
    """Models to compare candidates with: the full model, and the first individuals that some operators made.

    The latter have no parents, and are among the first 64 individuals of the search, or of the newest 20 that have the
    task.
    """
    only = find_named(connection, search)
    here = [one for one in _scored_contexts(connection, task, split, only, model) if one.split == split]
    s, t, i, e = searches.c, search_tasks.c, individuals.c, evaluations.c
    columns = s.id, s.name, s.model_fingerprint, s.engine_fingerprint, s.created_at
    query = select(*columns).join(search_tasks, t.search_id == s.id)
    query = query.where(t.task == task, s.model_fingerprint.in_({one.model_fingerprint for one in here}))
    query = query.distinct().order_by(s.created_at.desc(), s.id).limit(_SEARCHES)
    if only is not None:
        query = query.where(s.id == only.id)
    whole = dict[tuple[str, str], Mark]()
    found: list[Mark] = []
    for row in connection.execute(query):
        measured = row.model_fingerprint, row.engine_fingerprint
        ids = [one.id for one in here if (one.model_fingerprint, one.engine_fingerprint) == measured]
        mine = and_(i.search_id == row.id, i.idx < _EARLIEST, i.depth == 0, i.status == "ok", i.operator.in_(operators))
        first = (
            select(i.idx, i.operator, i.parameters, i.active_parameters, e.score)
            .join(evaluations, and_(e.context_id.in_(ids), e.phenotype_hash == i.phenotype_hash, e.score.is_not(None)))
            .where(mine)
            .order_by(i.idx)
        )
        found += [Mark(one[1], f"{row.name}:{one[0]}", (one[4],), one[2], one[3]) for one in connection.execute(first)]
        if measured not in whole:
            full = select(e.score).where(e.context_id.in_(ids), e.phenotype_hash == FULL_MODEL, e.score.is_not(None))
            size = select(i.parameters_full, i.active_parameters_full).where(i.search_id == row.id, i.idx == 0)
            for score in connection.execute(full.order_by(e.context_id.desc()).limit(1)).scalars():
                sizes = connection.execute(size).one_or_none() or (None, None)
                whole[measured] = Mark("full model", None, (score,), *sizes)
    return [*whole.values(), *found]


def _scored_contexts(
    connection: Connection, task: str, split: Split, search: SearchRecord | None, model: str | None
) -> list[Any]:
    if split not in SCORED:
        raise StoreError(f"a Pareto front needs a split of {', '.join(SCORED)}, got {split!r}")
    return task_contexts(connection, task, search, model)


def _sized(context: Any, sizes: ColumnElement[int | None]) -> tuple[ColumnElement[bool], ...]:
    return evaluations.c.context_id == context.id, evaluations.c.score.is_not(None), sizes.is_not(None)
