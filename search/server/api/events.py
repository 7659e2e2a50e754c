"""What happened to searches, and news of it as it happens."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from http import HTTPStatus
from typing import Annotated

from fastapi import APIRouter, Depends, HTTPException, Query
from fastapi.sse import EventSourceResponse, ServerSentEvent

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


def _check_watchers(service: ServiceDep) -> None:
    if service.feed.is_full:
        raise HTTPException(HTTPStatus.SERVICE_UNAVAILABLE, f"{MOST_WATCHERS} watch already", {"retry-after": "60"})


@routes.get(
    "/news",
    response_class=EventSourceResponse,
    dependencies=[Depends(_check_watchers)],
    responses={200: {"content": {"text/event-stream": {}}, "description": "Server-sent events, without end."}},
)
async def read_news(
    service: ServiceDep,
    search: Annotated[
        str | None, Query(max_length=200, description="Id of the search to hear of; default: all.")
    ] = None,
) -> AsyncIterator[ServerSentEvent]:
    """Server-sent events: `cursors` have the numbers of events and of complete individuals, by search id.

    The first has all searches, the others those that changed. `drivers` has the ids of searches whose driver came or
    went.
    """
    alive: dict[str, bool] = {}
    async with aclosing(service.feed.watch()) as watching:
        async for news in watching:
            told = {key: cursor for key, cursor in news.items() if search in (None, key)}
            if told:
                yield ServerSentEvent(event="cursors", data=told)
            turned = [key for key, cursor in told.items() if alive.get(key, cursor.alive) != cursor.alive]
            if turned:
                yield ServerSentEvent(event="drivers", data=turned)
            alive |= {key: cursor.alive for key, cursor in told.items()}
