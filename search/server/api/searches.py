"""Searches: what they are, where they stand, and what they came to."""

from __future__ import annotations

from fastapi import APIRouter
from fastapi.responses import PlainTextResponse

from moevolve.search.loop.standings import Standings, standings
from moevolve.search.running.driving import is_gone
from moevolve.search.server.api.parameters import AfterQuery, LimitQuery, SearchPath
from moevolve.search.server.problems import READS
from moevolve.search.server.service import ServiceDep
from moevolve.store.costs import SearchCosts
from moevolve.store.records import Control, IndividualRecord, Order, SearchRecord, SearchSummary

routes = APIRouter(tags=["searches"], responses=READS)


@routes.get("/searches")
def list_searches(service: ServiceDep) -> list[SearchSummary]:
    """All searches, oldest first."""
    return service.store.searches()


@routes.get("/searches/{search}")
def read_search(service: ServiceDep, search: SearchPath) -> SearchRecord:
    """One search."""
    return service.store.search(search)


@routes.get("/searches/{search}/control")
def read_control(service: ServiceDep, search: SearchPath) -> Control:
    """Who runs it, where it stands, and what is asked of it."""
    return service.store.control(service.store.search(search).id, is_gone)


@routes.get("/searches/{search}/standings")
def read_standings(service: ServiceDep, search: SearchPath) -> Standings:
    """Its winner and final table, as far as they are measured."""
    record = service.store.search(search)
    return standings(service.store, record, service.store.history(record.id))


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
