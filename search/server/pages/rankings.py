"""Pages about the best candidates of all searches: by task and budget, and score against size."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Annotated, TypeVar, get_args

from fastapi import APIRouter, Depends, Request
from fastapi.responses import HTMLResponse

from moevolve.evaluators.types import SCORED
from moevolve.search.interface.rankings import BestRequest, ParetoRequest
from moevolve.search.server.dependencies import ServerDep, ServerState
from moevolve.search.server.pages.forms import from_form
from moevolve.search.server.pages.rendering import render
from moevolve.store.pareto import Size

# Configurations per task on a page.
_ROWS = 25

R = TypeVar("R", BestRequest, ParetoRequest)
routes = APIRouter(include_in_schema=False, default_response_class=HTMLResponse)


BestDep = Annotated[BestRequest, Depends(from_form(BestRequest))]
ParetoDep = Annotated[ParetoRequest, Depends(from_form(ParetoRequest, task=""))]


@routes.get("/best")
def show_best(request: Request, server: ServerDep, asked: BestDep) -> HTMLResponse:
    """Return the best candidates of a model by task and budget."""
    asked = _of_one_model(server, asked)
    rows = replace(asked, limit=_ROWS).answer(server.store)
    return render(
        request,
        "best.jinja",
        rows=rows,
        tasks=sorted({*server.listings.tasks(), *(row.task for row in rows)}),
        searches=[one.search.name for one in server.listings.summaries()],
        models=sorted(set(server.listings.models().values())),
        splits=SCORED,
        chosen=asked,
    )


@routes.get("/pareto")
def show_pareto(request: Request, server: ServerDep, asked: ParetoDep) -> HTMLResponse:
    """Score against size for one model, or the tasks of a search against each other."""
    asked = _of_one_model(server, asked)
    if not asked.task:
        paths, every = server.listings.models(), server.listings.summaries()
        if asked.search is not None:
            every = [one for one in every if asked.search in (one.search.name, one.search.id)]
        own = [one.tasks[0] for one in every if one.tasks and paths[one.search.model_fingerprint] == asked.model]
        asked = replace(asked, task=own[-1] if own else "")
    found = server.listings.cached(repr(asked), partial(asked.answer, server.store)) if asked.task else None
    return render(
        request,
        "pareto.jinja",
        found=found,
        tasks=sorted({*server.listings.tasks(), *([asked.task] if asked.task else [])}),
        searches=[one.search.name for one in server.listings.summaries()],
        models=sorted(set(server.listings.models().values())),
        splits=SCORED,
        sizes=get_args(Size),
        chosen=asked,
    )


def _of_one_model(server: ServerState, asked: R) -> R:
    """Return a request for one model: that of the search if one is named, else, if none is, of the newest search."""
    if asked.search is not None:
        search = server.store.search(asked.search)
    elif asked.model is not None or not (every := server.listings.summaries()):
        return asked
    else:
        search = max(reversed(every), key=lambda one: asked.task in one.tasks).search
    return replace(asked, model=server.listings.models().get(search.model_fingerprint, search.model_path))
