"""Pages about the best configurations of all searches: by task and budget, and score against size."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Annotated, get_args

from fastapi import APIRouter, Depends, Request, Response
from fastapi.responses import HTMLResponse

from moevolve.evaluators.types import SCORED
from moevolve.search.interface.parameters import ScoredSplit, SizeUnit
from moevolve.search.interface.rankings import BestRequest, ParetoRequest
from moevolve.search.server.dependencies import NameQuery, ServerDep
from moevolve.search.server.pages.forms import csv_file, form_link, from_form
from moevolve.search.server.pages.rendering import render
from moevolve.search.text import flop_count, memory_size, parameter_count

_ROWS, _MOST_ROWS = 25, 1000
"""Configurations per task on a page, and in a file."""

routes = APIRouter(include_in_schema=False, default_response_class=HTMLResponse)


BestDep = Annotated[BestRequest, Depends(from_form(BestRequest))]


@routes.get("/best")
def show_best(request: Request, server: ServerDep, asked: BestDep) -> HTMLResponse:
    """The best configurations by task and budget."""
    rows = replace(asked, limit=_ROWS).answer(server.store)
    return render(
        request,
        "best.jinja",
        rows=rows,
        tasks=sorted({*server.listings.tasks(), *(row.task for row in rows)}),
        searches=[one.search.name for one in server.listings.summaries()],
        splits=SCORED,
        chosen=asked,
        link=form_link("/best.csv", asked),
    )


@routes.get("/best.csv")
def download_best(server: ServerDep, asked: BestDep) -> Response:
    """The best configurations as CSV."""
    return csv_file("best", replace(asked, limit=_MOST_ROWS).answer(server.store))


@routes.get("/pareto")
def show_pareto(
    request: Request,
    server: ServerDep,
    task: NameQuery = "",
    split: ScoredSplit = "search",
    search: NameQuery = "",
    size: SizeUnit = "parameters",
) -> HTMLResponse:
    """Score against size, or the tasks of a search against each other."""
    tasks = server.listings.tasks()
    first = None if search or not tasks else tasks[0]
    asked = ParetoRequest(task or first, split=split, search=search or None, size=size)
    known = asked.task or asked.search
    found = server.listings.cached(repr(asked), partial(asked.answer, server.store)) if known else None
    return render(
        request,
        "pareto.jinja",
        found=found,
        tasks=sorted({*tasks, *([asked.task] if asked.task else [])}),
        searches=[one.search.name for one in server.listings.summaries()],
        splits=SCORED,
        sizes=get_args(SizeUnit),
        chosen=asked,
        shown=_AXES[size],
        link=form_link("/api/pareto", asked, candidates=True),
    )


_AXES: dict[str, tuple[str, Callable[[float], str]]] = {
    "parameters": ("parameters", lambda value: parameter_count(round(value))),
    "bytes": ("bytes of the weights", lambda value: memory_size(round(value))),
    "flops": ("FLOPs per token", flop_count),
}
"""Name of each kind of size, and how it is written."""
