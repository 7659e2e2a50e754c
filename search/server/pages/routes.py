"""All pages together, and the files that they load."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from fastapi import APIRouter, FastAPI
from fastapi.responses import HTMLResponse, RedirectResponse
from starlette.responses import Response
from starlette.staticfiles import StaticFiles

from moevolve.search.server.guard import COOKIE
from moevolve.search.server.pages import comparing, health, individuals, launching, rankings, search_parts, searches
from moevolve.search.server.pages.listings import Listings
from moevolve.search.server.pages.rendering import FOLDER, sign_in
from moevolve.store.reader import StoreReader

MODULES = (searches, search_parts, individuals, rankings, comparing, launching, health)
"""Modules with the pages about one kind of thing each."""

routes = APIRouter(include_in_schema=False)


class _Files(StaticFiles):
    """Files that browsers ask for again each time, and get only if they changed."""

    def file_response(self, *args: Any, **kwargs: Any) -> Response:
        response = super().file_response(*args, **kwargs)
        response.headers["cache-control"] = "no-cache"
        return response


def add_pages(app: FastAPI, store: StoreReader) -> None:
    """Let an application have the pages, and what they load under /static/."""
    app.state.listings = Listings(store)
    for module in MODULES:
        app.include_router(module.routes)
    app.include_router(routes)
    app.mount(
        "/static", _Files(directory=FOLDER / "static", packages=[("moevolve.search.report", "static")]), name="static"
    )


@routes.get("/login")
def ask_for_token() -> HTMLResponse:
    """The page for signing in; the guard takes the token."""
    return HTMLResponse(sign_in(False, "/"))


@routes.get("/logout")
def sign_out() -> RedirectResponse:
    """Let the browser forget its token."""
    response = RedirectResponse("/login", HTTPStatus.SEE_OTHER)
    response.delete_cookie(COOKIE, httponly=True, samesite="strict")
    return response
