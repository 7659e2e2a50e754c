"""The best configurations over all searches: by task and budget, and score against size."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import HTMLResponse

from moevolve.evaluators.types import SCORED
from moevolve.search.operations.queries import best
from moevolve.search.requests.parameters import ScoredSplit
from moevolve.search.requests.searches import BestRequest
from moevolve.search.server.pages.forms import from_form
from moevolve.search.server.pages.listings import ListingsDep
from moevolve.search.server.pages.rendering import render
from moevolve.search.server.service import ServiceDep

_ROWS = 25
NameQuery = Annotated[str, Query(max_length=200)]
"""As forms send it: empty where nothing is chosen."""

routes = APIRouter(include_in_schema=False, default_response_class=HTMLResponse)


@routes.get("/best")
def show_best(
    request: Request,
    service: ServiceDep,
    listings: ListingsDep,
    asked: Annotated[BestRequest, Depends(from_form(BestRequest))],
) -> HTMLResponse:
    """The best by task and budget."""
    rows = best(service.store, replace(asked, limit=_ROWS))
    return render(
        request,
        "best.jinja",
        rows=rows,
        tasks=sorted({*listings.tasks(), *(row.task for row in rows)}),
        searches=[one.search.name for one in listings.summaries()],
        splits=SCORED,
        chosen=asked,
    )


@routes.get("/pareto")
def show_pareto(
    request: Request, listings: ListingsDep, task: NameQuery = "", split: ScoredSplit = "search", search: NameQuery = ""
) -> HTMLResponse:
    """Score against size."""
    tasks = listings.tasks()
    asked = task or (tasks[0] if tasks else "")
    return render(
        request,
        "pareto.jinja",
        rows=listings.pareto(asked, split, search or None) if asked else [],
        tasks=sorted({*tasks, asked} - {""}),
        searches=[one.search.name for one in listings.summaries()],
        splits=SCORED,
        chosen={"task": asked, "split": split, "search": search},
    )
