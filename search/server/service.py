"""What the routes work with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Request

from moevolve.search.server.drawing_queue import DrawingQueue
from moevolve.search.server.drivers import Drivers
from moevolve.search.server.feed import Feed
from moevolve.search.server.fitness_curves import FitnessCurves
from moevolve.search.server.settings import ServerSettings
from moevolve.store.reader import StoreReader
from moevolve.store.repository import Store


@dataclass(frozen=True, slots=True)
class Service:
    """A server's parts.

    Attributes:
        writer: what it serves, for routes that change something.
        settings: what it was started with.
        courses: plots' points.
        drawings: pictures and reports, in turn.
        feed: news.
        drivers: what it started.
    """

    writer: Store
    settings: ServerSettings
    courses: FitnessCurves
    drawings: DrawingQueue
    feed: Feed
    drivers: Drivers

    @property
    def store(self) -> StoreReader:
        """What it serves, for all that only read."""
        return self.writer


async def _service_of(request: Request) -> Service:
    """That of the application which got the request."""
    service: Service = request.app.state.service
    return service


ServiceDep = Annotated[Service, Depends(_service_of)]
"""Parameter of a route: the parts of the server that it belongs to."""
