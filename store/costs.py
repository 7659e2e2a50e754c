"""Cost of a search: counts and seconds of its evaluations, summed for reports."""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import Connection, and_, case, func, literal, select, union_all

from moevolve.evaluators.types import SPLITS, Split
from moevolve.store.records import FULL_MODEL, SearchRecord
from moevolve.store.tables import contexts, evaluations, individuals, search_tasks


@dataclass(frozen=True, slots=True)
class SplitCost:
    """Cost of the evaluations that a search's individuals and its full model have on one task split.

    Attributes:
        evaluations: Number of evaluations, one per phenotype, failed ones included.
        earlier: Number of evaluations that were older than the search and so were reused from other searches.
        examples: Total number of prompts scored.
        seconds: Total worker time of the evaluations that are not `earlier`.
        seconds_alone: Total worker time of the individuals' evaluations, as if none had been reused.
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
    """Cost of a search.

    Attributes:
        phenotypes: Number of distinct phenotypes among its individuals; repeated ones cost nothing.
        splits: Costs by task in the config's order, then by split; splits without evaluations are left out.
    """

    phenotypes: int
    splits: tuple[SplitCost, ...]


def read_costs(connection: Connection, search: SearchRecord) -> SearchCosts:
    """Return the cost of the evaluations of a search's individuals and of its full model."""
    i, e, t, c = individuals.c, evaluations.c, search_tasks.c, contexts.c
    own = select(i.phenotype_hash).where(i.search_id == search.id).distinct()
    phenotypes = connection.execute(select(func.count()).select_from(own.subquery())).scalar_one()
    # Evaluations are shared by all searches: those from before this one cost it nothing.
    new = e.created_at >= search.created_at
    same_split = and_(c.task_fingerprint == t.task_fingerprint, c.task == t.task, c.split == t.split)
    query = (
        select(
            *(t.task, t.split, func.count(), func.sum(case((new, 0), else_=1))),
            func.sum(case((e.score.is_(None), 1), else_=0)),
            *(func.sum(e.examples_seen), func.sum(case((new, e.seconds), else_=0.0))),
            func.sum(case((e.phenotype_hash == FULL_MODEL, 0.0), else_=e.seconds)),
        )
        .select_from(search_tasks.join(contexts, same_split).join(evaluations, e.context_id == c.id))
        .where(t.search_id == search.id)
        .where(c.model_fingerprint == search.model_fingerprint, c.engine_fingerprint == search.engine_fingerprint)
        .where(e.phenotype_hash.in_(union_all(own, select(literal(FULL_MODEL)))))
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
