"""Pages about the best configurations of all searches: by task and budget, and score against size."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

from fastapi import APIRouter, Depends, Request
from fastapi.responses import HTMLResponse

from moevolve.evaluators.types import SCORED
from moevolve.search.operations.queries import best
from moevolve.search.requests.parameters import ScoredSplit
from moevolve.search.requests.record import fields_of, one_line_errors
from moevolve.search.requests.searches import BestRequest
from moevolve.search.server.dependencies import NameQuery, ServerDep
from moevolve.search.server.pages.rendering import render

_ROWS = 25

routes = APIRouter(include_in_schema=False, default_response_class=HTMLResponse)


def _best_request(request: Request) -> BestRequest:
    # A form also sends the fields that were left empty.
    typed = {name: request.query_params.get(name, "").strip() for name in fields_of(BestRequest)}
    given: dict[str, object] = {name: text for name, text in typed.items() if text}
    with one_line_errors():
        return BestRequest(**given)  # type: ignore[arg-type]


@routes.get("/best")
def show_best(
    request: Request, server: ServerDep, asked: Annotated[BestRequest, Depends(_best_request)]
) -> HTMLResponse:
    """The best configurations by task and budget."""
    rows = best(server.store, replace(asked, limit=_ROWS))
    return render(
        request,
        "best.jinja",
        rows=rows,
        tasks=sorted({*server.listings.tasks(), *(row.task for row in rows)}),
        searches=[one.search.name for one in server.listings.summaries()],
        splits=SCORED,
        chosen=asked,
    )


@routes.get("/pareto")
def show_pareto(
    request: Request, server: ServerDep, task: NameQuery = "", split: ScoredSplit = "search", search: NameQuery = ""
) -> HTMLResponse:
    """Score against size."""
    tasks = server.listings.tasks()
    task = task or (tasks[0] if tasks else "")
    return render(
        request,
        "pareto.jinja",
        rows=server.listings.pareto(task, split, search or None) if task else [],
        tasks=sorted({*tasks, task} - {""}),
        searches=[one.search.name for one in server.listings.summaries()],
        splits=SCORED,
        chosen={"task": task, "split": split, "search": search},
    )
