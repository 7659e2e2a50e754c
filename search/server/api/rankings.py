"""Rankings over all searches, and the tasks that there are."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter, Query

from moevolve.evaluators.tasks.registry import list_tasks
from moevolve.search.server.api.parameters import LimitQuery, SearchQuery, TaskQuery
from moevolve.search.server.problems import READS
from moevolve.search.server.service import ServiceDep
from moevolve.store.records import BestRow

CountQuery = Annotated[int | None, Query(ge=0, lt=2**31)]
ScoredSplit = Literal["search", "dev", "test"]

routes = APIRouter(tags=["rankings"], responses=READS)


@routes.get("/best")
def list_best(
    service: ServiceDep,
    task: TaskQuery = None,
    experts: CountQuery = None,
    active: CountQuery = None,
    search: SearchQuery = None,
    by: ScoredSplit = "dev",
    limit: LimitQuery = 10,
) -> list[BestRow]:
    """The best configurations for a task, or for every one."""
    return service.store.best(task, experts, active, search, limit, by)


@routes.get("/pareto")
def list_pareto(
    service: ServiceDep,
    task: Annotated[str, Query(max_length=200)],
    split: ScoredSplit = "search",
    search: SearchQuery = None,
) -> list[BestRow]:
    """The configurations that no other beats in both score and parameters."""
    return service.store.pareto(task, split, search)


@routes.get("/tasks")
def list_task_names() -> list[str]:
    """The tasks that can be named in a launch."""
    return sorted(list_tasks())
