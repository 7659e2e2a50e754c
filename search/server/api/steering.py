"""Asking the driver of a search for something."""

from __future__ import annotations

from typing import Annotated, cast

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field

from moevolve.search.server.api.parameters import SearchPath
from moevolve.search.server.problems import WRITES
from moevolve.search.server.service import ServiceDep
from moevolve.search.service.steer import scale, steer
from moevolve.store.records import Control


class ScaleRequest(BaseModel):
    """How many workers a search is to have, its priority, or both; what isn't given stays."""

    model_config = ConfigDict(
        extra="forbid", json_schema_extra={"anyOf": [{"required": ["workers"]}, {"required": ["priority"]}]}
    )
    workers: Annotated[int, Field(ge=1, le=100_000)] = cast("int", None)
    priority: Annotated[int, Field(ge=-1000, le=1000)] = cast("int", None)


routes = APIRouter(tags=["steering"], responses=WRITES)


@routes.post("/searches/{search}/pause")
def pause(service: ServiceDep, search: SearchPath) -> Control:
    """Give its workers back and wait."""
    return steer(service.writer, search, "paused")


@routes.post("/searches/{search}/stop")
def stop(service: ServiceDep, search: SearchPath) -> Control:
    """End, and stay resumable."""
    return steer(service.writer, search, "stopped")


@routes.post("/searches/{search}/cancel")
def cancel(service: ServiceDep, search: SearchPath) -> Control:
    """End for good."""
    return steer(service.writer, search, "cancelled")


@routes.post("/searches/{search}/scale")
def scale_workers(service: ServiceDep, search: SearchPath, asked: ScaleRequest) -> Control:
    """Have so many workers from now on, or another priority."""
    return scale(service.writer, search, asked.workers, asked.priority)
