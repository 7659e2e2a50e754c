"""The application: routes, and the guard around them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.metadata import version

from fastapi import FastAPI
from fastapi.responses import PlainTextResponse, Response
from starlette.middleware.gzip import GZipMiddleware

from moevolve.search.server.api import drawings, events, launching, rankings, searches
from moevolve.search.server.api.requests import request_routes
from moevolve.search.server.drawing_queue import DrawingQueue
from moevolve.search.server.drivers import Drivers
from moevolve.search.server.feed import Feed
from moevolve.search.server.fitness_curves import FitnessCurves
from moevolve.search.server.guard import HEALTH, Guard
from moevolve.search.server.metrics import exposition
from moevolve.search.server.pages.rendering import problem_page, sign_in
from moevolve.search.server.pages.routes import add_pages
from moevolve.search.server.problems import READS, answer_errors
from moevolve.search.server.service import Service
from moevolve.search.server.settings import ServerSettings
from moevolve.store.repository import Store

ROUTERS = (searches, drawings, rankings, events, launching)
"""Modules with the routes of one kind of thing each, behind /api."""


def make_app(store: Store, settings: ServerSettings) -> Guard:
    """The application for a store, guarded.

    Raises:
        UserError: its tokens can't be read, or it needs some.
    """
    return Guard(make_routes(store, settings), settings.allowed_hosts, settings.read_tokens(), sign_in)


def make_routes(store: Store, settings: ServerSettings) -> FastAPI:
    """The application without the guard.

    Raises:
        UserError: the key of a webhook isn't in the environment.
    """
    drivers = Drivers(settings.store, settings.logs.resolve(), settings.webhooks)
    service = Service(store, settings, FitnessCurves(store), DrawingQueue(), Feed(store), drivers)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await service.feed.close()

    app = FastAPI(
        title="moevolve",
        version=version("moevolve"),
        description="Searches of a store: what they found, where they stand, and what they are asked to do.",
        openapi_url="/api/openapi.json",
        docs_url=None,
        redoc_url=None,
        lifespan=lifespan,
    )
    app.state.service = service
    answer_errors(app, problem_page)
    app.add_middleware(GZipMiddleware, minimum_size=1024)
    app.include_router(request_routes(), prefix="/api")
    for module in ROUTERS:
        app.include_router(module.routes, prefix="/api")
    add_pages(app, store)

    @app.head(HEALTH, include_in_schema=False)
    @app.get(HEALTH, responses=READS, response_class=PlainTextResponse)
    def healthz() -> str:
        """Whether the server answers and reaches its store."""
        store.controls()
        return "ok\n"

    @app.get(
        "/metrics",
        responses=READS | {200: {"content": {"text/plain": {}}, "description": "Prometheus' text format."}},
        response_class=Response,
    )
    def metrics() -> Response:
        """The store's searches in numbers, for Prometheus."""
        return Response(exposition(store), media_type="text/plain; version=0.0.4; charset=utf-8")

    return app
