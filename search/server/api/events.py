"""What happened to searches, and news of it as it happens."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query
from fastapi.responses import StreamingResponse

from moevolve.search.server.api.parameters import LimitQuery, SearchPath
from moevolve.search.server.problems import READS
from moevolve.search.server.service import Service
from moevolve.store.records import Event


def router(service: Service) -> APIRouter:
    """The routes."""
    routes = APIRouter(tags=["events"], responses=READS)
    store = service.store

    @routes.get("/events")
    def list_latest(limit: LimitQuery = 100) -> list[Event]:
        """What happened last, to any search, newest first."""
        return store.latest_events(limit=limit)

    @routes.get("/searches/{search}/events")
    def list_events(
        search: SearchPath,
        after: Annotated[int, Query(ge=0, lt=2**63, description="Number of the last event that is known.")] = 0,
        limit: LimitQuery = 1000,
    ) -> list[Event]:
        """What happened to a search since then, oldest first."""
        return store.events({store.search(search).id: after}, limit)

    @routes.get(
        "/news",
        response_class=StreamingResponse,
        responses={200: {"content": {"text/event-stream": {}}, "description": "Server-sent events, without end."}},
    )
    async def read_news() -> StreamingResponse:
        """Server-sent events `cursors`: by search id, how many events and complete individuals it has."""
        return StreamingResponse(service.feed.watch(), media_type="text/event-stream")

    return routes
