"""What there is to know about one search besides where it stands: fetched when it is wanted."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse

from moevolve.evaluators.types import SCORED
from moevolve.search.config.files import parse_stored_config
from moevolve.search.loop.final_table import build_final_table
from moevolve.search.report.contents import settings_text
from moevolve.search.server.api.parameters import SearchPath
from moevolve.search.server.pages.rendering import render
from moevolve.search.server.pages.views import config_of, improvements, spans_of, workers_of
from moevolve.search.server.service import ServiceDep

routes = APIRouter(include_in_schema=False, default_response_class=HTMLResponse)


@routes.get("/searches/{search}/course")
def show_course(request: Request, service: ServiceDep, search: SearchPath) -> HTMLResponse:
    """The steps of the best so far."""
    record = service.store.search(search)
    steps = improvements(service.courses.course(record.id), spans_of(config_of(record)))
    return render(request, "course.jinja", search=record, steps=steps)


@routes.get("/searches/{search}/standings")
def show_standings(request: Request, service: ServiceDep, search: SearchPath) -> HTMLResponse:
    """The final table."""
    record = service.store.search(search)
    config = parse_stored_config(record.config)  # fails before all individuals are read
    found = build_final_table(service.store, record, config, service.store.history(record.id))
    return render(request, "standings.jinja", search=record, found=found, splits=SCORED)


@routes.get("/searches/{search}/costs")
def show_costs(request: Request, service: ServiceDep, search: SearchPath) -> HTMLResponse:
    """What its evaluations cost."""
    record = service.store.search(search)
    return render(request, "costs.jinja", search=record, costs=service.store.costs(record))


@routes.get("/searches/{search}/workers")
def show_workers(request: Request, service: ServiceDep, search: SearchPath) -> HTMLResponse:
    """Who evaluated lately."""
    record = service.store.search(search)
    return render(request, "workers.jinja", search=record, workers=workers_of(service.store, record))


@routes.get("/searches/{search}/settings")
def show_settings(request: Request, service: ServiceDep, search: SearchPath) -> HTMLResponse:
    """Its configuration as YAML."""
    record = service.store.search(search)
    return render(request, "settings.jinja", search=record, settings=settings_text(record.config))
