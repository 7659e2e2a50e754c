"""Routes that start processes on the server's machine (searches, resumed searches, exports and shrinks), and uploads.

Requests refer to run files, models, files of requests, tasks and individuals by names that the server knows.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Annotated

from fastapi import APIRouter, HTTPException, Path, Query, Request
from pydantic import TypeAdapter, ValidationError
from starlette.requests import ClientDisconnect

from moevolve.evaluators.errors import UserError
from moevolve.search.config.run import SearchName
from moevolve.search.interface.checkpoints.export import CheckpointRequest, ExportRequest
from moevolve.search.interface.request import fields_of
from moevolve.search.running.lease_heartbeat import unpause
from moevolve.search.server.api.requests import model_of, options_of
from moevolve.search.server.dependencies import CHANGES, RefPath, SearchPath, ServerDep
from moevolve.search.server.planning import (
    LaunchPlan,
    RemoteLaunchRequest,
    plan_launch,
    start_launch,
)
from moevolve.search.server.problems import WRITES
from moevolve.search.server.processes import RETRY_S, BusyError, Job
from moevolve.search.server.shrinks import RemoteShrinkRequest, resume_shrink, start_shrink, state_of, stop_shrink
from moevolve.search.server.uploads import DataFile, delete_upload, keep_upload, list_files
from moevolve.store.records import Control

_NAME = TypeAdapter(SearchName)
_EXPORT_OPTIONS = tuple(fields_of(CheckpointRequest))
_FILE = {
    "requestBody": {
        "required": True,
        "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}},
    }
}
NamePath = Annotated[str, Path(max_length=100, description="Name of the file, of JSON, JSONL, CSV, TSV or text.")]
ColumnsQuery = Annotated[
    str | None, Query(max_length=1000, description="Columns to read, as a shrink's `columns`, which needs them again.")
]


class ExportOptions(model_of(ExportRequest, _EXPORT_OPTIONS)):  # type: ignore[misc]
    """How to export an individual."""


routes = APIRouter(tags=["launching"], responses=WRITES)


@routes.get("/configurations")
def list_configurations(server: ServerDep) -> list[str]:
    """List the names of run files that can be launched."""
    return sorted(server.settings.run_files())


@routes.get("/models")
def list_models(server: ServerDep) -> list[str]:
    """List the names of checkpoints that a launch can use instead of its run file's."""
    return sorted(server.settings.models)


@routes.get("/data")
def list_data(server: ServerDep) -> list[DataFile]:
    """List the files of requests that checkpoints can be shrunk for."""
    return list_files(server.settings)


@routes.put("/data/{name}", dependencies=[CHANGES], status_code=HTTPStatus.CREATED, openapi_extra=_FILE)
async def upload(request: Request, server: ServerDep, name: NamePath, columns: ColumnsQuery = None) -> DataFile:
    """Upload a file of requests, which is checked and then listed. No other file is replaced."""
    try:
        return await keep_upload(name, request.stream(), server, columns)
    except ClientDisconnect:
        raise HTTPException(HTTPStatus.BAD_REQUEST, f"{name}: the connection ended before the file") from None


@routes.delete("/data/{name}", dependencies=[CHANGES])
def delete(server: ServerDep, name: NamePath) -> None:
    """Delete an uploaded file of requests, unless a running shrink uses it."""
    delete_upload(name, server)


@routes.get("/launches")
def list_launches(server: ServerDep) -> list[Job]:
    """List the processes that were started since the server was, the latest last."""
    return server.processes.jobs()


@routes.post("/searches", dependencies=[CHANGES], status_code=HTTPStatus.ACCEPTED)
def launch(server: ServerDep, asked: RemoteLaunchRequest) -> Job:
    """Launch a search on the server's machine. Repeating the request starts no second one."""
    return start_launch(asked, server)


@routes.post("/searches/check", dependencies=[CHANGES])
async def check(server: ServerDep, asked: RemoteLaunchRequest) -> LaunchPlan:
    """Check a launch, and estimate its memory and time. Nothing is started, and no weights are loaded."""
    return await plan_launch(asked, server)


@routes.post("/searches/{search}/resume", dependencies=[CHANGES], status_code=HTTPStatus.ACCEPTED)
def resume(server: ServerDep, search: SearchPath) -> Job | None:
    """Let a paused search continue where it runs (returns null), or continue one without a driver on this machine.

    A shrink continues as a whole, whichever server started it.
    """
    record = server.store.search(search)
    _refuse_foreign(record.name)
    if unpause(server.writer, record.id):
        return None
    if record.status in ("finished", "cancelled"):
        raise UserError(f"search {record.name} is {record.status}")
    control = server.store.control(record.id)
    if control.alive:
        state = f"ending, as it was asked to; try again in {RETRY_S} s"
        if control.desired_state == "running":
            state = f"being run by {control.owner} already"
        raise BusyError(f"search {record.name} is {state}")
    return resume_shrink(record.name, server) or server.processes.start(record.name, ["resume", record.name])


@routes.post("/individuals/{ref}/export", dependencies=[CHANGES], status_code=HTTPStatus.ACCEPTED)
def export(server: ServerDep, ref: RefPath, asked: ExportOptions) -> Job:
    """Export an individual as a checkpoint into the server's folder for exports."""
    if server.settings.exports is None:
        raise UserError("this server has no folder for exports; see `exports` in its settings")
    found = server.store.individual(ref)
    _refuse_foreign(found.search.name)
    target = server.settings.exports.resolve() / found.ref.replace(":", "-")
    options = options_of(ExportRequest, asked, _EXPORT_OPTIONS)
    return server.processes.start(found.ref, ["export", found.ref, str(target), *options])


@routes.post("/shrinks", dependencies=[CHANGES], status_code=HTTPStatus.ACCEPTED)
async def shrink(server: ServerDep, asked: RemoteShrinkRequest) -> Job:
    """Make a smaller checkpoint on the server's machine. Repeating the request continues an interrupted one."""
    return await start_shrink(asked, server)


@routes.post("/shrinks/{name}/stop", dependencies=[CHANGES])
def stop(server: ServerDep, name: SearchPath) -> Control:
    """Stop a shrink; it can be resumed."""
    return stop_shrink(name, server)


@routes.post("/shrinks/{name}/resume", dependencies=[CHANGES], status_code=HTTPStatus.ACCEPTED)
def resume_whole(server: ServerDep, name: SearchPath) -> Job:
    """Continue a shrink on this machine, up to its checkpoint, whichever server started it."""
    state = state_of(server, name)
    if state.is_running:
        raise BusyError(f"shrink {state.name} is {state.state} already")
    job = resume_shrink(state.name, server)
    if job is None:
        raise UserError(f"shrink {state.name}: its folder isn't in this server's `exports`; resume it where it began")
    return job


def _refuse_foreign(name: str) -> None:
    """Refuse to start processes for a search of another store whose name is a path or looks like an option."""
    try:
        _NAME.validate_python(name)
    except ValidationError:
        raise UserError(f"search {name!r}: a server starts nothing for a search that no launch calls so") from None
