"""Searches: what they are, where they stand, and what they came to."""

from __future__ import annotations

from fastapi import APIRouter
from fastapi.responses import PlainTextResponse

from moevolve.search.loop.standings import Standings, standings
from moevolve.search.server.api.parameters import AfterQuery, LimitQuery, SearchPath
from moevolve.search.server.problems import READS
from moevolve.search.server.service import Service
from moevolve.search.service.driving import is_gone
from moevolve.store.costs import SearchCosts
from moevolve.store.records import Control, IndividualRecord, Order, SearchRecord, SearchSummary


def router(service: Service) -> APIRouter:
    """The routes."""
    routes = APIRouter(tags=["searches"], responses=READS)
    store = service.store

    @routes.get("/searches")
    def list_searches() -> list[SearchSummary]:
        """All searches, oldest first."""
        return store.searches()

    @routes.get("/searches/{search}")
    def read_search(search: SearchPath) -> SearchRecord:
        """One search."""
        return store.search(search)

    @routes.get("/searches/{search}/control")
    def read_control(search: SearchPath) -> Control:
        """Who runs it, where it stands, and what is asked of it."""
        return store.control(store.search(search).id, is_gone)

    @routes.get("/searches/{search}/standings")
    def read_standings(search: SearchPath) -> Standings:
        """Its winner and final table, as far as they are measured."""
        record = store.search(search)
        return standings(store, record, store.history(record.id))

    @routes.get("/searches/{search}/costs")
    def read_costs(search: SearchPath) -> SearchCosts:
        """What its evaluations cost."""
        return store.costs(store.search(search))

    @routes.get("/searches/{search}/individuals", response_model_exclude={"__all__": {"genome"}})
    def list_individuals(
        search: SearchPath,
        order: Order = "best",
        after: AfterQuery = None,
        limit: LimitQuery = 50,
    ) -> list[IndividualRecord]:
        """A page of its individuals, without their genomes."""
        return store.page(store.search(search).id, order, after, limit)

    @routes.get("/searches/{search}/log", response_class=PlainTextResponse)
    def read_log(search: SearchPath) -> str:
        """The last of the log of a search that was launched from here; empty of others."""
        return service.drivers.log(store.search(search).name)

    return routes
