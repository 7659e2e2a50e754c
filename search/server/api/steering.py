"""Asking the driver of a search for something."""

from __future__ import annotations

from typing import Annotated, cast

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field

from moevolve.search.server.api.parameters import SearchPath
from moevolve.search.server.problems import WRITES
from moevolve.search.server.service import Service
from moevolve.search.service.steer import scale, steer
from moevolve.store.records import Control


class ScaleRequest(BaseModel):
    """How many workers a search is to have, its priority, or both; what isn't given stays."""

    model_config = ConfigDict(
        extra="forbid", json_schema_extra={"anyOf": [{"required": ["workers"]}, {"required": ["priority"]}]}
    )
    workers: Annotated[int, Field(ge=1, le=100_000)] = cast("int", None)
    priority: Annotated[int, Field(ge=-1000, le=1000)] = cast("int", None)


def router(service: Service) -> APIRouter:
    """The routes."""
    routes = APIRouter(tags=["steering"], responses=WRITES)
    store = service.writer

    @routes.post("/searches/{search}/pause")
    def pause(search: SearchPath) -> Control:
        """Give its workers back and wait."""
        return steer(store, search, "paused")

    @routes.post("/searches/{search}/stop")
    def stop(search: SearchPath) -> Control:
        """End, and stay resumable."""
        return steer(store, search, "stopped")

    @routes.post("/searches/{search}/cancel")
    def cancel(search: SearchPath) -> Control:
        """End for good."""
        return steer(store, search, "cancelled")

    @routes.post("/searches/{search}/scale")
    def scale_workers(search: SearchPath, asked: ScaleRequest) -> Control:
        """Have so many workers from now on, or another priority."""
        return scale(store, search, asked.workers, asked.priority)

    return routes
