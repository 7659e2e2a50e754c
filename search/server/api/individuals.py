"""Individuals: what is known of one, and who it descends from."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query

from moevolve.search.server.api.parameters import RefPath
from moevolve.search.server.problems import READS
from moevolve.search.server.service import ServiceDep
from moevolve.store.records import IndividualDetail, LineageGraph

DepthQuery = Annotated[int | None, Query(ge=0, le=10_000, description="At most so many generations.")]

routes = APIRouter(tags=["individuals"], responses=READS)


@routes.get("/individuals/{ref}")
def read_individual(service: ServiceDep, ref: RefPath) -> IndividualDetail:
    """One individual, with its evaluations and exports."""
    return service.store.individual(ref)


@routes.get("/individuals/{ref}/ancestors")
def list_ancestors(service: ServiceDep, ref: RefPath, depth: DepthQuery = None) -> LineageGraph:
    """It, and all that it descends from."""
    return service.store.ancestors(ref, depth)


@routes.get("/individuals/{ref}/descendants")
def list_descendants(service: ServiceDep, ref: RefPath, depth: DepthQuery = None) -> LineageGraph:
    """It, and all that descend from it."""
    return service.store.descendants(ref, depth)
