"""The page of all searches, and that of one."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request
from fastapi.responses import HTMLResponse

from moevolve.search.server.api.parameters import AfterQuery, SearchPath
from moevolve.search.server.pages.listings import ListingsDep
from moevolve.search.server.pages.rendering import render
from moevolve.search.server.pages.views import (
    config_of,
    spans_of,
    view_of_search,
    view_of_summary,
)
from moevolve.search.server.service import ServiceDep
from moevolve.store.records import Order

_SEARCHES, _ROWS, _EVENTS, _MANY_EVENTS = 50, 25, 10, 500
"""Lines of a page: of searches, of individuals, of events among other things and alone."""
_AT_ONCE = 20_000
"""Individuals of a search up to which what reads them all is shown without being asked for."""

routes = APIRouter(include_in_schema=False, default_response_class=HTMLResponse)


@routes.get("/")
def show_searches(
    request: Request, service: ServiceDep, listings: ListingsDep, skip: Annotated[int, Query(ge=0, lt=2**31)] = 0
) -> HTMLResponse:
    """All searches, and what happened last."""
    controls = listings.controls()
    found = listings.summaries(controls)[::-1]
    views = [
        view_of_summary(one, controls[one.search.id])
        for one in found[skip : skip + _SEARCHES]
        if one.search.id in controls
    ]
    return render(
        request,
        "searches.jinja",
        views=views,
        count=len(found),
        skip=skip,
        next=skip + _SEARCHES if skip + _SEARCHES < len(found) else None,
        events=[] if skip else service.store.latest_events(limit=_EVENTS),
        searches={one.search.id: one.search for one in found},
    )


@routes.get("/searches/{search}")
def show_search(
    request: Request, service: ServiceDep, search: SearchPath, order: Order = "best", after: AfterQuery = None
) -> HTMLResponse:
    """One search; parts of it that take long are fetched later."""
    record = service.store.search(search)
    view = view_of_search(service.store, record, service.store.control(record.id))
    config = config_of(record)
    return render(
        request,
        "search.jinja",
        view=view,
        events=service.store.latest_events(record.id, _EVENTS),
        rows=service.store.page(record.id, order, after, _ROWS),
        limit=_ROWS,
        order=order,
        after=after,
        spans=[{"kind": span.kind, "start": span.start, "stop": span.stop} for span in spans_of(config)],
        readable=config is not None,
        again=config is not None and not config.is_imported and bool(service.settings.configurations),
        at_once=view.made <= _AT_ONCE,
        log=bool(service.drivers.log(record.name)),
    )


@routes.get("/searches/{search}/now")
def show_now(request: Request, service: ServiceDep, search: SearchPath) -> HTMLResponse:
    """Where it stands now."""
    record = service.store.search(search)
    view = view_of_search(service.store, record, service.store.control(record.id))
    return render(request, "now.jinja", view=view)


@routes.get("/searches/{search}/events")
def show_events(request: Request, service: ServiceDep, search: SearchPath) -> HTMLResponse:
    """What happened to it."""
    record = service.store.search(search)
    limit = _EVENTS if "part" in request.query_params else _MANY_EVENTS
    return render(request, "events.jinja", search=record, events=service.store.latest_events(record.id, limit))


@routes.get("/searches/{search}/individuals")
def show_individuals(
    request: Request, service: ServiceDep, search: SearchPath, order: Order = "best", after: AfterQuery = None
) -> HTMLResponse:
    """A page of its individuals."""
    record = service.store.search(search)
    rows = service.store.page(record.id, order, after, _ROWS)
    return render(request, "individuals.jinja", search=record, rows=rows, limit=_ROWS, order=order, after=after)
