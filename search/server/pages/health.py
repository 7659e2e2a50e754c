"""Whether everything is well: the store, who runs which search, and what this server started."""

from __future__ import annotations

import time
from pathlib import Path

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse

from moevolve.search.server.pages.listings import ListingsDep
from moevolve.search.server.pages.rendering import render
from moevolve.search.server.pages.views import view_of_summary, workers_of
from moevolve.search.server.service import ServiceDep
from moevolve.store.schema import newest_revision

_SEARCHES = 8
"""Whose workers are shown at once."""

routes = APIRouter(include_in_schema=False, default_response_class=HTMLResponse)


@routes.get("/health")
def show_health(request: Request, service: ServiceDep, listings: ListingsDep) -> HTMLResponse:
    """The page of the whole server."""
    before = time.perf_counter()
    controls = listings.controls()
    seconds = time.perf_counter() - before
    views = [
        view_of_summary(one, controls[one.search.id])
        for one in listings.summaries(controls)
        if one.search.id in controls
    ]
    alive = [view for view in views if view.control.alive]
    return render(
        request,
        "health.jinja",
        kind=service.store.url.partition(":")[0].partition("+")[0],
        file=Path(service.store.location).name if service.store.is_file else None,
        revision=newest_revision(),
        milliseconds=1000 * seconds,
        count=len(views),
        alive=alive,
        abandoned=[view for view in views if view.is_orphaned],
        workers=[(view.search, workers_of(service.store, view.search)) for view in alive[:_SEARCHES]],
        launches=service.drivers.launches(),
    )
