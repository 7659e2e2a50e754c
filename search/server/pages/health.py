"""The page about the server itself: its store, running searches, requests and started processes."""

from __future__ import annotations

import time
from pathlib import Path

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse

from moevolve.search.server.dependencies import ServerDep
from moevolve.search.server.pages.rendering import render
from moevolve.search.server.pages.views import view_of_summary
from moevolve.store.records import EventKind
from moevolve.store.schema import newest_revision

# Kinds of events that name who requested something.
_ASKED: tuple[EventKind, ...] = ("asked", "exported", "retried")
# Number of requests that are listed, the latest.
_REQUESTS = 50

routes = APIRouter(include_in_schema=False, default_response_class=HTMLResponse)


@routes.get("/health")
def show_health(request: Request, server: ServerDep) -> HTMLResponse:
    """Show the state of the server and of running work."""
    before = time.perf_counter()
    controls = server.listings.controls()
    seconds = time.perf_counter() - before
    views = [
        view_of_summary(one, controls[one.search.id])
        for one in server.listings.summaries()
        if one.search.id in controls
    ]
    alive = [view for view in views if view.control.alive]
    return render(
        request,
        "health.jinja",
        kind=server.store.url.partition(":")[0].partition("+")[0],
        file=Path(server.store.location).name if server.store.is_file else None,
        revision=newest_revision(),
        milliseconds=1000 * seconds,
        count=len(views),
        alive=alive,
        damaged=[view for view in views if view.control.fault is not None],
        asked=server.store.latest_events(limit=_REQUESTS, kinds=_ASKED),
        searches={view.search.id: view.search for view in views},
        orphaned=[view for view in views if view.is_orphaned],
        jobs=server.processes.jobs(),
    )
