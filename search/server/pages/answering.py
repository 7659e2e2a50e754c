"""The page of an individual's answers beside another model's, row by row."""

from __future__ import annotations

from concurrent.futures import Future
from functools import partial
from http import HTTPStatus
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse

from moevolve.evaluators.errors import UserError
from moevolve.search.interface.answers import Answers, AnswersRequest, StoredAnswers, StoredAnswersRequest
from moevolve.search.loop.scores import FULL
from moevolve.search.report.rendering import handle
from moevolve.search.server.dependencies import RefPath, ServerDep, ServerState
from moevolve.search.server.pages.forms import form_link, from_form
from moevolve.search.server.pages.rendering import render
from moevolve.store.reader import StoreReader
from moevolve.store.records import FULL_MODEL, IndividualDetail

_PREFERRED = ("test", "dev", "search")
"""Splits in the order in which one is shown if none was chosen."""

routes = APIRouter(include_in_schema=False, default_response_class=HTMLResponse)


@routes.get("/individuals/{individual}/answers")
def show_answers(request: Request, server: ServerDep, individual: RefPath) -> HTMLResponse:
    """On which rows an individual and another model are right, and their answers once those are generated."""
    detail = server.store.individual(individual)
    asked = _asked(request, server.store, detail)
    if asked is None:
        return render(request, "answers.jinja", detail=detail)
    try:
        found = _stored(server, asked)
    except UserError as error:
        return render(request, "answers.jinja", note=str(error), **_form(detail, asked))
    generated = server.answers.found(_generation(asked, found))
    return render(request, "answers.jinja", **_form(detail, asked), **_rows(found, generated))


@routes.post("/individuals/{individual}/answers", status_code=HTTPStatus.ACCEPTED)
def generate_answers(request: Request, server: ServerDep, individual: RefPath) -> HTMLResponse:
    """Have the answers to the rows that a page shows generated; the page's part then shows what becomes of it."""
    detail = server.store.individual(individual)
    asked = _asked(request, server.store, detail)
    if asked is None:
        raise UserError(f"{detail.ref} has no stored outcomes")
    found = _stored(server, asked)
    generation = _generation(asked, found)
    server.answers.start(generation)
    context = _form(detail, asked) | _rows(found, server.answers.found(generation))
    return render(request, "answers_part.jinja", HTTPStatus.ACCEPTED, **context)


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


def _stored(server: ServerState, asked: StoredAnswersRequest) -> StoredAnswers:
    """The answer to a request, which a page asks for every two seconds while answers are generated."""
    return server.listings.cached(repr(asked), partial(asked.answer, server.store))


def _generation(asked: StoredAnswersRequest, found: StoredAnswers) -> AnswersRequest:
    """What generates the answers to the rows that are shown."""
    others = () if asked.against == FULL else (asked.against,)
    rows = tuple(row.row for row in found.rows)
    return AnswersRequest((*others, asked.individual), task=asked.task, split=asked.split, rows=rows)


def _form(detail: IndividualDetail, asked: StoredAnswersRequest) -> dict[str, Any]:
    """Variables of the form that chooses rows, and of links to other rows."""
    scored = [each for each in detail.evaluations if each.outcomes]
    here = f"/individuals/{handle(detail.search)}:{detail.individual.index}/answers"
    return {
        "detail": detail,
        "asked": asked,
        "tasks": sorted({each.task for each in scored}),
        "splits": sorted({each.split for each in scored}, key=_PREFERRED.index),
        "link": partial(form_link, here, asked, individual=None),  # which is in the path
    }


def _rows(found: StoredAnswers, generated: Future[Answers] | None) -> dict[str, Any]:
    """Variables of the rows that are shown, and of what becomes of their answers."""
    running = generated is not None and not generated.done()
    fault = generated.exception() if generated is not None and not running else None
    texts = {}
    if generated is not None and not running and fault is None:
        answers = generated.result()
        places = [answers.models.index(name) for name in found.models]
        texts = {row.row: [row.answers[place].text for place in places] for row in answers.rows}
    return {"found": found, "running": running, "failure": fault, "texts": texts}
