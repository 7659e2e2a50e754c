"""Individuals: what is known of one, and who it descends from."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query

from moevolve.search.server.api.parameters import RefPath
from moevolve.search.server.problems import READS
from moevolve.search.server.service import Service
from moevolve.store.records import IndividualDetail, LineageGraph

DepthQuery = Annotated[int | None, Query(ge=0, le=10_000, description="At most so many generations.")]


def router(service: Service) -> APIRouter:
    """The routes."""
    routes = APIRouter(tags=["individuals"], responses=READS)
    store = service.store

    @routes.get("/individuals/{ref}")
    def read_individual(ref: RefPath) -> IndividualDetail:
        """One individual, with its evaluations and exports."""
        return store.individual(ref)

    @routes.get("/individuals/{ref}/ancestors")
    def list_ancestors(ref: RefPath, depth: DepthQuery = None) -> LineageGraph:
        """It, and all that it descends from."""
        return store.ancestors(ref, depth)

    @routes.get("/individuals/{ref}/descendants")
    def list_descendants(ref: RefPath, depth: DepthQuery = None) -> LineageGraph:
        """It, and all that descend from it."""
        return store.descendants(ref, depth)

    return routes
