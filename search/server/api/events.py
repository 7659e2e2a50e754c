"""What happened to searches, and news of it as it happens."""

from __future__ import annotations

from http import HTTPStatus
from typing import Annotated

from fastapi import APIRouter, HTTPException, Query
from fastapi.responses import StreamingResponse

from moevolve.search.server.api.parameters import LimitQuery, SearchPath
from moevolve.search.server.feed import MOST_WATCHERS
from moevolve.search.server.problems import READS
from moevolve.search.server.service import ServiceDep
from moevolve.store.records import Event

routes = APIRouter(tags=["events"], responses=READS)


@routes.get("/events")
def list_latest(service: ServiceDep, limit: LimitQuery = 100) -> list[Event]:
    """What happened last, to any search, newest first."""
    return service.store.latest_events(limit=limit)


@routes.get("/searches/{search}/events")
def list_events(
    service: ServiceDep,
    search: SearchPath,
    after: Annotated[int, Query(ge=0, lt=2**63, description="Number of the last event that is known.")] = 0,
    limit: LimitQuery = 1000,
) -> list[Event]:
    """What happened to a search since then, oldest first."""
    return service.store.events({service.store.search(search).id: after}, limit)


@routes.get(
    "/news",
    response_class=StreamingResponse,
    responses={200: {"content": {"text/event-stream": {}}, "description": "Server-sent events, without end."}},
)
async def read_news(service: ServiceDep) -> StreamingResponse:
    """Server-sent events `cursors`: by search id, how many events and complete individuals it has."""
    if service.feed.is_full:
        raise HTTPException(HTTPStatus.SERVICE_UNAVAILABLE, f"{MOST_WATCHERS} watch already", {"retry-after": "60"})
    return StreamingResponse(service.feed.watch(), media_type="text/event-stream")
