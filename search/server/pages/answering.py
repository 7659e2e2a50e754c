"""The page of an individual's answers beside another model's, row by row."""

from __future__ import annotations

from concurrent.futures import Future
from http import HTTPStatus
from typing import Any, get_args

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse

from moevolve.evaluators.errors import UserError
from moevolve.search.loop.scores import FULL
from moevolve.search.operations.answers import outcomes
from moevolve.search.report.rendering import handle
from moevolve.search.requests.answers import Answers, Outcomes
from moevolve.search.requests.models import AnswerFilter, AnswersRequest, OutcomesRequest
from moevolve.search.server.dependencies import RefPath, ServerDep
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
    asked, found, note = _asked(request, server.store, detail), None, ""
    if asked is not None:
        try:
            found = outcomes(server.store, asked)
        except UserError as error:
            note = str(error)
    generated = None if found is None or asked is None else server.answers.found(_generation(asked, found))
    return render(request, "answers.jinja", **_shown(detail, asked, found, generated), note=note)


@routes.post("/individuals/{individual}/answers", status_code=HTTPStatus.ACCEPTED)
def generate_answers(request: Request, server: ServerDep, individual: RefPath) -> HTMLResponse:
    """Have the answers to the rows that a page shows generated; the page's part then shows what becomes of it."""
    detail = server.store.individual(individual)
    asked = _asked(request, server.store, detail)
    if asked is None:
        raise UserError(f"{detail.ref} has no stored outcomes")
    found = outcomes(server.store, asked)
    generation = _generation(asked, found)
    server.answers.start(generation)
    context = _shown(detail, asked, found, server.answers.found(generation))
    return render(request, "answers_part.jinja", HTTPStatus.ACCEPTED, **context)


def _asked(request: Request, store: StoreReader, detail: IndividualDetail) -> OutcomesRequest | None:
    """What a page's query asks for, or else the first split with outcomes of both; None without any outcomes."""
    scored = [each for each in detail.evaluations if each.outcomes]
    if not scored:
        return None
    search, splits = detail.search, [each.task_fingerprint for each in scored]
    full = store.evaluations(FULL_MODEL, search.model_fingerprint, search.engine_fingerprint, splits)
    both = {each.task_fingerprint for each in full if each.outcomes}
    first = min(scored, key=lambda each: (each.task_fingerprint not in both, _PREFERRED.index(each.split)))
    return from_form(OutcomesRequest, task=first.task, split=first.split)(request)


def _generation(asked: OutcomesRequest, found: Outcomes) -> AnswersRequest:
    """What generates the answers to the rows that are shown."""
    others = () if asked.against == FULL else (asked.against,)
    rows = tuple(row.row for row in found.rows)
    return AnswersRequest((*others, asked.individual), task=asked.task, split=asked.split, rows=rows)


def _shown(
    detail: IndividualDetail, asked: OutcomesRequest | None, found: Outcomes | None, generated: Future[Answers] | None
) -> dict[str, Any]:
    """Variables of `answers.jinja`, and of the part of it that is replaced while answers are generated."""
    running, failure, texts = False, "", {}
    if generated is not None and not generated.done():
        running = True
    elif generated is not None and generated.exception():
        failure = str(generated.exception())
    elif generated is not None and found is not None:
        answers = generated.result()
        places = [answers.models.index(name) for name in found.models]
        texts = {row.row: [row.answers[place].text for place in places] for row in answers.rows}
    here = f"/individuals/{handle(detail.search)}:{detail.individual.index}/answers"

    def link(**changes: Any) -> str:
        # The individual is in the path.
        return here if asked is None else form_link(here, asked, individual=None, **changes)

    return {
        "detail": detail,
        "asked": asked,
        "found": found,
        "splits": sorted({each.split for each in detail.evaluations if each.outcomes}, key=_PREFERRED.index),
        "tasks": sorted({each.task for each in detail.evaluations if each.outcomes}),
        "filters": get_args(AnswerFilter),
        "link": link,
        "running": running,
        "failure": failure,
        "texts": texts,
    }
