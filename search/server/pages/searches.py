"""The page that lists all searches, the page of one search, and its parts that are fetched on demand."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from http import HTTPStatus
from typing import Annotated, get_args
from urllib.parse import quote

from fastapi import APIRouter, Depends, Query, Request, Response
from fastapi.responses import HTMLResponse, RedirectResponse

from moevolve.evaluators.types import SCORED
from moevolve.search.config.files import parse_stored_config
from moevolve.search.interface.request import one_line_errors
from moevolve.search.interface.searches import CompareRequest, SearchesRequest, SearchOrder
from moevolve.search.loop.final_table import build_final_table
from moevolve.search.report.contents import gather, settings_text
from moevolve.search.report.page import render_page
from moevolve.search.report.rendering import handle
from moevolve.search.results.effects import effects
from moevolve.search.server.dependencies import AfterQuery, NameQuery, SearchPath, ServerDep, ServerState
from moevolve.search.server.guard import DOCUMENT_POLICY
from moevolve.search.server.pages.forms import form_link, from_form
from moevolve.search.server.pages.launching import arrival_page, search_or_launch
from moevolve.search.server.pages.rendering import render, render_part
from moevolve.search.server.pages.shrinking import checkpoint_context
from moevolve.search.server.pages.views import (
    SearchView,
    config_of,
    spans_of,
    view_of_search,
    view_of_summary,
)
from moevolve.search.server.processes import Job
from moevolve.search.server.shrinks import ShrinkState, process_of
from moevolve.store.records import SEARCH_STATUSES, Order, SearchRecord

# Rows per page: searches, individuals, events on a page with other things, events on a page of their own.
_SEARCHES, _ROWS, _EVENTS, _MANY_EVENTS = 50, 25, 10, 500
# Largest search for which parts that read all individuals are loaded without a click.
_MAX_INDIVIDUALS = 20_000

routes = APIRouter(include_in_schema=False, default_response_class=HTMLResponse)


ListDep = Annotated[SearchesRequest, Depends(from_form(SearchesRequest, sort="newest"))]


@routes.get("/")
def show_searches(
    request: Request, server: ServerDep, asked: ListDep, skip: Annotated[int, Query(ge=0, lt=2**31)] = 0
) -> HTMLResponse:
    """Return the searches that were asked for, and the latest events."""
    controls = server.listings.controls()
    every = server.listings.summaries()
    found = [one for one in asked.selected(every) if one.search.id in controls]
    return render(
        request,
        "searches.jinja",
        views=[view_of_summary(one, controls[one.search.id]) for one in found[skip : skip + _SEARCHES]],
        count=len(found),
        total=len(every),
        skip=skip,
        next=skip + _SEARCHES if skip + _SEARCHES < len(found) else None,
        events=[] if skip else server.store.latest_events(limit=_EVENTS),
        searches={one.search.id: one.search for one in every},
        asked=asked,
        link=partial(form_link, "/", asked),
        tasks=server.listings.tasks(),
        statuses=SEARCH_STATUSES,
        orders=get_args(SearchOrder),
    )


@routes.get("/compare")
def show_comparison(
    request: Request,
    server: ServerDep,
    searches: Annotated[list[NameQuery], Query()] = [],  # noqa: B006
) -> HTMLResponse:
    """Searches beside each other, or what to do to see some."""
    names = [name.strip() for each in searches for name in each.split(",") if name.strip()]
    found = None
    if names:
        with one_line_errors():
            asked = CompareRequest(names)
        found = server.listings.cached(repr(asked), partial(asked.answer, server.store))
    records = {} if found is None else {one.name: server.store.search(one.name) for one in found.searches}
    return render(request, "compare.jinja", found=found, names=names, splits=SCORED, records=records)


@routes.get("/searches/{search}")
def show_search(
    request: Request, server: ServerDep, search: SearchPath, order: Order = "best", after: AfterQuery = None
) -> Response:
    """Return one search, without the parts that are slow to compute; before it is stored, the state of its launch."""
    found = search_or_launch(server, search)
    if isinstance(found, ShrinkState):
        return RedirectResponse(f"/shrinks/{quote(found.name, '')}", HTTPStatus.SEE_OTHER)
    if isinstance(found, Job):
        return arrival_page(request, server, found)
    record, config = found, config_of(found)
    view = _view(server, record)
    return render(
        request,
        "search.jinja",
        view=view,
        events=server.store.latest_events(record.id, _EVENTS),
        rows=server.store.page(record.id, order, after, _ROWS),
        scale=view.scale,
        limit=_ROWS,
        order=order,
        after=after,
        spans=[{"kind": span.kind, "start": span.start, "stop": span.stop} for span in spans_of(config)],
        readable=config is not None,
        at_once=view.individuals <= _MAX_INDIVIDUALS,
        log=bool(server.processes.log(process_of(server, record.name))),
        **checkpoint_context(server, record),
    )


@routes.get("/searches/{search}/now")
def show_now(request: Request, server: ServerDep, search: SearchPath) -> HTMLResponse:
    """State and progress of a search."""
    record = server.store.search(search)
    view = _view(server, record)
    return _part(request, record, "now", "State of", view=view)


@routes.get("/searches/{search}/events")
def show_events(request: Request, server: ServerDep, search: SearchPath) -> HTMLResponse:
    """Events of a search."""
    record = server.store.search(search)
    limit = _EVENTS if "part" in request.query_params else _MANY_EVENTS
    return _part(request, record, "events", "Events of", events=server.store.latest_events(record.id, limit))


@routes.get("/searches/{search}/individuals")
def show_individuals(
    request: Request, server: ServerDep, search: SearchPath, order: Order = "best", after: AfterQuery = None
) -> HTMLResponse:
    """Return the individuals of a search, page by page."""
    record = server.store.search(search)
    rows = server.store.page(record.id, order, after, _ROWS)
    scale, shown = server.store.scales(record.id).fitness, {"limit": _ROWS, "order": order, "after": after}
    return _part(request, record, "individuals", "Individuals of", rows=rows, scale=scale, **shown)


@routes.get("/searches/{search}/standings")
def show_standings(request: Request, server: ServerDep, search: SearchPath) -> HTMLResponse:
    """Return the final table of a search."""
    record = server.store.search(search)
    config = parse_stored_config(record.config, record.name)  # may fail, so it comes before reading all individuals
    found = build_final_table(server.store, record, config, server.store.history(record.id))
    return _part(request, record, "standings", "Final table of", found=found, splits=SCORED)


@routes.get("/searches/{search}/effects")
def show_effects(request: Request, server: ServerDep, search: SearchPath) -> HTMLResponse:
    """Return what came of each operator's individuals."""
    record = server.store.search(search)
    read = partial(effects, server.store, record.id)
    found = server.listings.cached(f"effects of {record.id}", read)
    return _part(request, record, "effects", "What mattered in", found=found)


@routes.get("/searches/{search}/report")
async def show_report(server: ServerDep, search: SearchPath) -> HTMLResponse:
    """Return the page about a search that `moevolve report` writes."""

    def write() -> HTMLResponse:
        page = render_page(gather(server.store, search))
        return HTMLResponse(page, headers={"content-security-policy": DOCUMENT_POLICY})

    return await server.drawings.run(write)


@routes.get("/searches/{search}/costs")
def show_costs(request: Request, server: ServerDep, search: SearchPath) -> HTMLResponse:
    """Costs of a search's evaluations."""
    record = server.store.search(search)
    return _part(request, record, "costs", "Costs of", costs=server.listings.costs(record))


@routes.get("/searches/{search}/settings")
def show_settings(request: Request, server: ServerDep, search: SearchPath) -> HTMLResponse:
    """Configuration of a search as YAML."""
    record = server.store.search(search)
    return _part(request, record, "settings", "Settings of", settings=settings_text(record.config, record.name))


def _view(server: ServerState, record: SearchRecord) -> SearchView:
    """Return the view of a search, with its winner's score on test, which listings know."""
    view = view_of_search(server.store, record, server.store.control(record.id))
    name = process_of(server, record.name)
    if view.actions and not view.control.alive and record.updated_at is not None and server.processes.knows(name):
        job = server.processes.job(name)
        # One that was started before has just ended it.
        view = replace(view, arriving=job.running and job.started_at > record.updated_at)
    listed = next((one for one in server.listings.summaries() if one.search.id == record.id), None)
    return view if listed is None else replace(view, test=listed.test, mean_scale=listed.mean_scale)


def _part(request: Request, search: SearchRecord, name: str, what: str, **context: object) -> HTMLResponse:
    """Return a part of the page of a search as a page of its own."""
    here = f"/searches/{handle(search)}"
    return render_part(request, name, what, search.name, here, search=search, **context)
