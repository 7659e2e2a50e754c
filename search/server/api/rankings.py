"""Rankings over all searches, and the tasks that there are."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query

from moevolve.evaluators.preparation.registry import list_tasks
from moevolve.search.requests.parameters import ScoredSplit
from moevolve.search.server.api.parameters import SearchQuery
from moevolve.search.server.problems import READS
from moevolve.search.server.service import ServiceDep
from moevolve.store.records import BestRow

routes = APIRouter(tags=["rankings"], responses=READS)


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
