"""The page that shows searches beside each other: courses, settings that differ, and their winners' scores."""

from __future__ import annotations

from functools import partial
from typing import Annotated, get_args
from urllib.parse import urlencode

from fastapi import APIRouter, Query, Request
from fastapi.responses import HTMLResponse

from moevolve.evaluators.types import SCORED
from moevolve.search.analysis.contrast import contrast
from moevolve.search.config.run import LONGEST_NAME
from moevolve.search.requests.record import one_line_errors
from moevolve.search.requests.searches import ContrastRequest
from moevolve.search.server.dependencies import ServerDep
from moevolve.search.server.pages.rendering import render
from moevolve.store.records import CourseAxis

routes = APIRouter(include_in_schema=False, default_response_class=HTMLResponse)


@routes.get("/contrast")
def show_contrast(
    request: Request,
    server: ServerDep,
    searches: Annotated[list[Annotated[str, Query(max_length=LONGEST_NAME)]], Query()] = [],  # noqa: B006
    by: CourseAxis = "evaluations",
) -> HTMLResponse:
    """Searches beside each other, or what to do to see some."""
    names = [name.strip() for each in searches for name in each.split(",") if name.strip()]
    found, link = None, ""
    if names:
        with one_line_errors():
            asked = ContrastRequest(names, by=by)
        found = server.listings.cached(repr(asked), partial(contrast, server.store, asked))
        link = urlencode({"searches": names}, doseq=True)
    return render(
        request,
        "contrast.jinja",
        found=found,
        names=names,
        by=by,
        axes=get_args(CourseAxis),
        link=link,
        splits=SCORED,
        records={} if found is None else {one.name: server.store.search(one.name) for one in found.searches},
    )
