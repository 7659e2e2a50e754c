"""Searches: what they are, where they stand, and what they came to."""

from __future__ import annotations

from fastapi import APIRouter
from fastapi.responses import PlainTextResponse

from moevolve.search.server.api.parameters import AfterQuery, LimitQuery, SearchPath
from moevolve.search.server.problems import READS
from moevolve.search.server.service import ServiceDep
from moevolve.store.costs import SearchCosts
from moevolve.store.records import IndividualRecord, Order

routes = APIRouter(tags=["searches"], responses=READS)


@routes.get("/searches/{search}/costs")
def read_costs(service: ServiceDep, search: SearchPath) -> SearchCosts:
    """What its evaluations cost."""
    return service.store.costs(service.store.search(search))


@routes.get("/searches/{search}/individuals", response_model_exclude={"__all__": {"genome"}})
def list_individuals(
    service: ServiceDep,
    search: SearchPath,
    order: Order = "best",
    after: AfterQuery = None,
    limit: LimitQuery = 50,
) -> list[IndividualRecord]:
    """A page of its individuals, without their genomes."""
    return service.store.page(service.store.search(search).id, order, after, limit)


@routes.get("/searches/{search}/log", response_class=PlainTextResponse)
def read_log(service: ServiceDep, search: SearchPath) -> str:
    """The last of the log of a search that was launched from here; empty of others."""
    return service.drivers.log(service.store.search(search).name)
