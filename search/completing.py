"""Stopped individuals that count after all: when more of the best are re-ranked than the search had in view."""

from __future__ import annotations

from moevolve.search.desk import EvaluationDesk
from moevolve.search.plan import Plan
from moevolve.search.ranking_values import ranking_values
from moevolve.store.records import FitnessRecord, HistoryRow, IndividualStatus
from moevolve.store.repository import Store


def leaders_of(plan: Plan, store: Store, desk: EvaluationDesk) -> list[HistoryRow]:
    """The best few individuals by fitness, as many as are re-ranked, as if none had been stopped.

    A search stops nobody who could be among them. If it is resumed with a larger `final.rerank`, those stopped ones
    that may be are evaluated to their end first. Racing has given them up, as it may.
    """
    count = max(1, plan.config.final.rerank)
    leaders = store.best_of_search(plan.search_id, count)
    if plan.config.early_stopping == "racing":
        return leaders
    least = leaders[-1].fitness if len(leaders) == count else None
    hopeful = [
        row
        for row in store.history(plan.search_id)
        if row.status == "stopped" and (least is None or row.bound is None or row.bound >= least)
    ]
    if not hopeful:
        return leaders
    complete(plan, store, desk, hopeful)
    return store.best_of_search(plan.search_id, count)


def complete(plan: Plan, store: Store, desk: EvaluationDesk, rows: list[HistoryRow]) -> None:
    """Evaluate stopped individuals to their end; their status in the store says so afterwards."""
    jobs = [plan.job(plan.space.from_bytes(row.genome), "search") for row in rows]
    settled = {item.job.key: item for item in desk.run(jobs)}
    fitness = []
    for row, job in zip(rows, jobs, strict=True):
        item = settled[job.key]
        values: tuple[float | None, float | None] = (None, None)
        if item.failure is None:
            score, tie_break = ranking_values(plan, item.evaluations)
            values = score - job.penalty, tie_break
        status: IndividualStatus = "ok" if item.failure is None else "failed"
        fitness.append(FitnessRecord(row.index, status, *values, item.failure))
    evaluations = desk.unsaved
    store.record(plan.search_id, evaluations=evaluations, fitness=fitness)
    desk.saved(len(evaluations))
