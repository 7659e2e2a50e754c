"""The course of a search as points, for plots that are drawn in the browser."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query

from moevolve.search.server.api.parameters import SearchPath
from moevolve.search.server.fitness_curves import MOST_POINTS, FitnessCurve
from moevolve.search.server.problems import READS
from moevolve.search.server.service import ServiceDep

routes = APIRouter(tags=["drawings"], responses=READS)


@routes.get("/searches/{search}/course")
def read_course(
    service: ServiceDep,
    search: SearchPath,
    points: Annotated[int, Query(ge=1, le=MOST_POINTS, description="At most so many.")] = MOST_POINTS,
) -> FitnessCurve:
    """Fitness over individuals, down-sampled."""
    return service.courses.course(service.store.search(search).id, points)
