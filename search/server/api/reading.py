"""Routes that read the store and aren't made from request records, among them the stream of news."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from http import HTTPStatus
from typing import Annotated

from fastapi import APIRouter, Depends, HTTPException, Query
from fastapi.responses import PlainTextResponse
from fastapi.sse import EventSourceResponse, ServerSentEvent

from moevolve.evaluators.preparation.registry import list_tasks
from moevolve.search.config.run import LONGEST_NAME
from moevolve.search.server.caches import MAX_POINTS, FitnessCurve, fitness_curve
from moevolve.search.server.dependencies import AfterQuery, LimitQuery, SearchPath, ServerDep
from moevolve.search.server.feed import MAX_WATCHERS
from moevolve.search.server.problems import READS
from moevolve.search.server.shrinks import process_of
from moevolve.search.shrink.record import ShrinkRecord, find_shrink, read_shrinks
from moevolve.store.costs import SearchCosts
from moevolve.store.errors import NotFoundError
from moevolve.store.records import Event, EventKind, IndividualRecord, Order

routes = APIRouter(responses=READS)


@routes.get("/searches/{search}/costs", tags=["searches"])
def read_costs(server: ServerDep, search: SearchPath) -> SearchCosts:
    """Evaluations, prompts and worker time of a search, by task and split."""
    return server.listings.costs(server.store.search(search))


@routes.get("/searches/{search}/individuals", tags=["searches"], response_model_exclude={"__all__": {"genome"}})
def list_individuals(
    server: ServerDep,
    search: SearchPath,
    order: Order = "best",
    after: AfterQuery = None,
    limit: LimitQuery = 50,
) -> list[IndividualRecord]:
    """List the individuals of a search page by page, without their genomes."""
    return server.store.page(server.store.search(search).id, order, after, limit)


@routes.get("/searches/{search}/log", tags=["searches"], response_class=PlainTextResponse)
def read_log(server: ServerDep, search: SearchPath) -> str:
    """Return the end of a search's log, from its start on; empty if the search wasn't launched by this server."""
    try:
        name = process_of(server, server.store.search(search).name)
    except NotFoundError:
        if not server.processes.knows(search) and find_shrink(server.store, search) is None:
            raise
        name = search  # it is being started, or failed to
    return server.processes.log(name)


@routes.get("/shrinks", tags=["shrinks"])
def list_shrinks(server: ServerDep) -> list[ShrinkRecord]:
    """List the records of all shrinks, the one that changed last first."""
    return read_shrinks(server.store)


@routes.get("/shrinks/{name}", tags=["shrinks"])
def read_shrink(server: ServerDep, name: SearchPath) -> ShrinkRecord:
    """Return what a shrink has decided, done and found; the name may be that of one of its searches."""
    found = find_shrink(server.store, name)
    if found is None:
        raise NotFoundError(f"no shrink {name!r}")
    return found


@routes.get("/searches/{search}/course", tags=["drawings"])
def read_course(
    server: ServerDep,
    search: SearchPath,
    points: Annotated[int, Query(ge=1, le=MAX_POINTS, description="Maximum number of points.")] = MAX_POINTS,
) -> FitnessCurve:
    """Fitness over individuals, down-sampled for a plot."""
    return fitness_curve(server.store, server.store.search(search).id, points)


@routes.get("/tasks", tags=["rankings"])
def list_task_names() -> list[str]:
    """List the tasks that a launch can name."""
    return sorted(list_tasks())


@routes.get("/events", tags=["events"])
def list_latest(
    server: ServerDep,
    limit: LimitQuery = 100,
    kind: Annotated[
        list[EventKind] | None, Query(max_length=20, description="List only events of these kinds.")
    ] = None,
) -> list[Event]:
    """List the latest events of all searches, newest first. Those of kind `asked` say who asked for what."""
    return server.store.latest_events(limit=limit, kinds=kind or ())


@routes.get("/searches/{search}/events", tags=["events"])
def list_events(
    server: ServerDep,
    search: SearchPath,
    after: Annotated[int, Query(ge=0, lt=2**63, description="Number of the last known event.")] = 0,
    limit: LimitQuery = 1000,
) -> list[Event]:
    """List a search's events after a known one, oldest first."""
    return server.store.events({server.store.search(search).id: after}, limit)


def _check_watchers(server: ServerDep) -> None:
    if server.feed.is_full:
        raise HTTPException(HTTPStatus.SERVICE_UNAVAILABLE, f"{MAX_WATCHERS} watch already", {"retry-after": "60"})


@routes.get(
    "/news",
    tags=["events"],
    response_class=EventSourceResponse,
    dependencies=[Depends(_check_watchers)],
    responses={200: {"content": {"text/event-stream": {}}, "description": "An endless stream of events."}},
)
async def read_news(
    server: ServerDep,
    search: Annotated[str | None, Query(max_length=LONGEST_NAME, description="Id of a search; default: all.")] = None,
) -> AsyncIterator[ServerSentEvent]:
    """Stream news as server-sent events.

    `cursors` events have the numbers of events and of complete individuals, by search id: first for all searches, then
    for those that changed. `drivers` events have the ids of searches whose driver has started or ended.
    """
    alive: dict[str, bool] = {}
    async with aclosing(server.feed.watch()) as updates:
        async for update in updates:
            cursors = {key: cursor for key, cursor in update.items() if search in (None, key)}
            if cursors:
                yield ServerSentEvent(event="cursors", data=cursors)
            changed = [key for key, cursor in cursors.items() if alive.get(key, cursor.alive) != cursor.alive]
            if changed:
                yield ServerSentEvent(event="drivers", data=changed)
            alive |= {key: cursor.alive for key, cursor in cursors.items()}
