"""Routes that start processes on the server's machine: searches, resumed searches and exports.

Requests refer to run files, models and individuals by names that the server knows.
"""

from __future__ import annotations

from http import HTTPStatus

from fastapi import APIRouter

from moevolve.evaluators.errors import UserError
from moevolve.search.requests.models import ExportRequest
from moevolve.search.running.steer import unpause
from moevolve.search.server.api.requests import model_of, options_of
from moevolve.search.server.dependencies import CHANGES, RefPath, SearchPath, ServerDep
from moevolve.search.server.planning import LaunchPlan, RemoteLaunchRequest, plan_launch, start_launch
from moevolve.search.server.problems import WRITES
from moevolve.search.server.processes import RETRY_S, BusyError, Job

_EXPORT_OPTIONS = ("form", "mtp", "requantise", "pad_experts", "device", "dtype")


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
    """Let a paused search continue where it runs (returns null), or continue one without a driver on this machine."""
    record = server.store.search(search)
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
    address = [] if server.settings.address is None else ["--address", server.settings.address]
    return server.processes.start(record.name, ["resume", record.name, *address])


@routes.post("/individuals/{ref}/export", dependencies=[CHANGES], status_code=HTTPStatus.ACCEPTED)
def export(server: ServerDep, ref: RefPath, asked: ExportOptions) -> Job:
    """Export an individual as a checkpoint into the server's folder for exports."""
    if server.settings.exports is None:
        raise UserError("this server has no folder for exports; see `exports` in its settings")
    found = server.store.individual(ref)
    target = server.settings.exports.resolve() / found.ref.replace(":", "-")
    options = options_of(ExportRequest, asked, _EXPORT_OPTIONS)
    return server.processes.start(found.ref, ["export", found.ref, str(target), *options])
