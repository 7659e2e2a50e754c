"""The ASGI application: all routes, and the guard around them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.metadata import version
from typing import Any

from fastapi import Depends, FastAPI
from starlette.middleware.gzip import GZipMiddleware
from starlette.responses import Response
from starlette.staticfiles import StaticFiles

from moevolve.search.server import metrics
from moevolve.search.server.api import launching, reading
from moevolve.search.server.api.requests import request_routes
from moevolve.search.server.caches import Listings
from moevolve.search.server.dependencies import NEEDS_TOKEN, ServerState, refuse_doubtful_json
from moevolve.search.server.feed import Feed
from moevolve.search.server.guard import Guard
from moevolve.search.server.pages import (
    individuals,
    rankings,
    rendering,
    searches,
    shrinking,
)
from moevolve.search.server.pages import launching as launch_pages
from moevolve.search.server.problems import answer_errors
from moevolve.search.server.processes import ProcessRunner
from moevolve.search.server.queues import ChildQueue, SerialQueue
from moevolve.search.server.settings import ServerSettings
from moevolve.store.repository import Store
from moevolve.workers.children.process import ChildProcess

_OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
# Longest time of a check, and time without one after which the process that makes them gives its memory back.
_CHECK_LIMIT_S, _CHECK_IDLE_S = 120.0, 300.0
# Most memory of the check of an uploaded file: for libraries, and for each byte of the largest file. Short rows take 11
# times their bytes.
_CHECK_BYTES, _BYTES_OF_FILE = 256 << 20, 20


def make_app(store: Store, settings: ServerSettings) -> Guard:
    """Return the application for a store, with access control.

    Raises:
        UserError: the tokens can't be read, or tokens are needed and there are none.
    """
    routes, tokens = make_routes(store, settings), settings.read_tokens()
    return Guard(routes, settings.allowed_hosts, tokens, rendering.sign_in, settings.upload_bytes)


def make_routes(store: Store, settings: ServerSettings) -> FastAPI:
    """Return the application without access control."""
    processes = ProcessRunner(settings.store, settings.logs.resolve())
    server = ServerState(
        writer=store,
        settings=settings,
        drawings=SerialQueue("drawings"),
        checks=ChildQueue("checks", ChildProcess(environment=_OFFLINE, limit_s=_CHECK_LIMIT_S, idle_s=_CHECK_IDLE_S)),
        uploads=(_upload_checks(settings), _upload_checks(settings)),
        feed=Feed(store),
        processes=processes,
        listings=Listings(store),
    )

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await server.feed.close()
        for queue in (server.checks, *server.uploads):
            queue.close()

    app = FastAPI(
        title="moevolve",
        version=version("moevolve"),
        description="Searches of a store: their results and progress, and commands to start and control them.",
        openapi_url="/api/openapi.json",
        docs_url=None,
        redoc_url=None,
        lifespan=lifespan,
        dependencies=[Depends(refuse_doubtful_json)],
    )
    app.state.server = server
    answer_errors(app, rendering.problem_page)
    app.add_middleware(GZipMiddleware, minimum_size=1024)
    app.include_router(request_routes(), prefix="/api", dependencies=[NEEDS_TOKEN])
    for module in (reading, launching):
        app.include_router(module.routes, prefix="/api", dependencies=[NEEDS_TOKEN])
    app.include_router(metrics.routes)
    for pages in (searches, individuals, rankings, launch_pages, shrinking):
        app.include_router(pages.routes)
    app.include_router(rendering.routes)
    files = _RevalidatedFiles(directory=rendering.FOLDER / "static", packages=[("moevolve.search.report", "static")])
    app.mount("/static", files, name="static")
    return app


def _upload_checks(settings: ServerSettings) -> ChildQueue:
    memory = _CHECK_BYTES + _BYTES_OF_FILE * settings.upload_bytes
    return ChildQueue("checks", ChildProcess(limit_s=_CHECK_LIMIT_S, idle_s=_CHECK_IDLE_S, memory=memory))


class _RevalidatedFiles(StaticFiles):
    """Static files that browsers keep, but ask for again each time in case they have changed."""

    def file_response(self, *args: Any, **kwargs: Any) -> Response:
        response = super().file_response(*args, **kwargs)
        response.headers["cache-control"] = "no-cache"
        return response
