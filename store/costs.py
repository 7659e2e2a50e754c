"""What a search cost, and how large its individuals are: sums over evaluations, for reports."""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import ColumnElement, Connection, Join, and_, case, func, or_, select

from moevolve.store.records import FULL_MODEL, SPLITS, SearchRecord, Split
from moevolve.store.tables import contexts, evaluations, individuals, search_tasks


@dataclass(frozen=True, slots=True)
class SplitCost:
    """The evaluations that a search's individuals and its full model have on its own version of one task split.

    Attributes:
        evaluations: one per phenotype, failed ones included.
        earlier: of these, made before the search was: taken over from other searches of the store.
        failed: of these, without a score.
        examples: prompts scored in all.
        seconds: on the workers, in all; those of earlier ones not counted.
        seconds_alone: what the individuals' evaluations would have taken without what other searches left.
    """

    task: str
    split: Split
    evaluations: int
    earlier: int
    failed: int
    examples: int
    seconds: float
    seconds_alone: float


@dataclass(frozen=True, slots=True)
class SearchCosts:
    """What a search cost.

    Attributes:
        phenotypes: different ones among its individuals; the others repeat one and cost nothing.
        splits: by task as configured, then search, dev, test; without those that nothing was evaluated on.
    """

    phenotypes: int
    splits: tuple[SplitCost, ...]


def read_costs(connection: Connection, search: SearchRecord) -> SearchCosts:
    """Sums over the evaluations of a search's individuals and of its full model."""
    i, e, t = individuals.c, evaluations.c, search_tasks.c
    own = select(i.phenotype_hash).where(i.search_id == search.id).distinct()
    phenotypes = connection.execute(select(func.count()).select_from(own.subquery())).scalar_one()
    new = e.created_at >= search.created_at
    query = (
        select(
            *(t.task, t.split, func.count(), func.sum(case((new, 0), else_=1))),
            func.sum(case((e.failure.is_not(None), 1), else_=0)),
            *(func.sum(e.examples_seen), func.sum(case((new, e.seconds), else_=0.0))),
            func.sum(case((e.phenotype_hash == FULL_MODEL, 0.0), else_=e.seconds)),
        )
        .select_from(_own_evaluations())
        .where(t.search_id == search.id, *_own_contexts(search))
        .where(or_(e.phenotype_hash == FULL_MODEL, e.phenotype_hash.in_(own)))
        .group_by(t.task, t.split, t.position)
        .order_by(t.position)
    )
    found = [
        SplitCost(task, split, int(count), int(earlier), int(failed), int(examples), seconds, alone)
        for task, split, count, earlier, failed, examples, seconds, alone in connection.execute(query)
    ]
    order = {task: place for place, task in enumerate(dict.fromkeys(one.task for one in found))}
    found.sort(key=lambda one: (order[one.task], SPLITS.index(one.split)))
    return SearchCosts(phenotypes, tuple(found))


def _own_evaluations() -> Join:
    """Searches' task splits with the evaluations that belong to their contexts."""
    c, t = contexts.c, search_tasks.c
    same = and_(c.task_fingerprint == t.task_fingerprint, c.task == t.task, c.split == t.split)
    return search_tasks.join(contexts, same).join(evaluations, evaluations.c.context_id == c.id)


def _own_contexts(search: SearchRecord) -> tuple[ColumnElement[bool], ...]:
    c = contexts.c
    return c.model_fingerprint == search.model_fingerprint, c.engine_fingerprint == search.engine_fingerprint
