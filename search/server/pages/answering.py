"""The page of an individual's outcomes beside another model's, row by row."""

from __future__ import annotations

from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse

from moevolve.evaluators.errors import UserError
from moevolve.search.interface.answers import StoredAnswersRequest
from moevolve.search.report.rendering import handle
from moevolve.search.server.dependencies import RefPath, ServerDep
from moevolve.search.server.pages.forms import form_link, from_form
from moevolve.search.server.pages.rendering import render
from moevolve.store.reader import StoreReader
from moevolve.store.records import FULL_MODEL, IndividualDetail

# Splits in the order in which one is shown if none was chosen.
_PREFERRED = ("test", "dev", "search")

routes = APIRouter(include_in_schema=False, default_response_class=HTMLResponse)


@routes.get("/individuals/{individual}/answers")
def show_answers(request: Request, server: ServerDep, individual: RefPath) -> HTMLResponse:
    """On which rows an individual and another model are right."""
    detail = server.store.individual(individual)
    asked = _asked(request, server.store, detail)
    if asked is None:
        return render(request, "answers.jinja", detail=detail)
    scored = [each for each in detail.evaluations if each.outcomes]
    form: dict[str, Any] = {
        "detail": detail,
        "asked": asked,
        "tasks": sorted({each.task for each in scored}),
        "splits": sorted({each.split for each in scored}, key=_PREFERRED.index),
    }
    try:
        found = asked.answer(server.store)
    except UserError as error:
        return render(request, "answers.jinja", note=str(error), **form)
    here = f"/individuals/{handle(detail.search)}:{detail.individual.index}/answers"
    link = partial(form_link, here, asked, individual=None)  # which is in the path
    return render(request, "answers.jinja", found=found, link=link, **form)


def _asked(request: Request, store: StoreReader, detail: IndividualDetail) -> StoredAnswersRequest | None:
    """What a page's query asks for, or else the first split with outcomes of both; None without any outcomes."""
    scored = [each for each in detail.evaluations if each.outcomes]
    if not scored:
        return None
    if {"task", "split"} <= request.query_params.keys():
        return from_form(StoredAnswersRequest)(request)
    search, splits = detail.search, [each.task_fingerprint for each in scored]
    full = store.evaluations(FULL_MODEL, search.model_fingerprint, search.engine_fingerprint, splits)
    both = {each.task_fingerprint for each in full if each.outcomes}
    first = min(scored, key=lambda each: (each.task_fingerprint not in both, _PREFERRED.index(each.split)))
    return from_form(StoredAnswersRequest, task=first.task, split=first.split)(request)
