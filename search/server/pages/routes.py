"""All pages, the one for signing in, and the static files."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, FastAPI
from fastapi.responses import HTMLResponse
from starlette.responses import Response
from starlette.staticfiles import StaticFiles

from moevolve.search.server.pages import (
    comparing,
    contrasting,
    health,
    individuals,
    launching,
    rankings,
    searches,
)
from moevolve.search.server.pages.rendering import FOLDER, sign_in

routes = APIRouter(include_in_schema=False)


class _RevalidatedFiles(StaticFiles):
    """Static files that browsers keep, but ask for again each time in case they have changed."""

    def file_response(self, *args: Any, **kwargs: Any) -> Response:
        response = super().file_response(*args, **kwargs)
        response.headers["cache-control"] = "no-cache"
        return response


def add_pages(app: FastAPI) -> None:
    """Add the pages to an application, and the files they load under /static/."""
    for module in (searches, individuals, rankings, comparing, contrasting, launching, health):
        app.include_router(module.routes)
    app.include_router(routes)
    files = _RevalidatedFiles(directory=FOLDER / "static", packages=[("moevolve.search.report", "static")])
    app.mount("/static", files, name="static")


@routes.get("/login")
def ask_for_token() -> HTMLResponse:
    """The sign-in page; the guard handles its form."""
    return HTMLResponse(sign_in(False, "/"))
