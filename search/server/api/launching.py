"""Routes that start processes on the server's machine: searches, resumed searches, exports and shrinks.

Requests refer to run files, models, files of requests, tasks and individuals by names that the server knows.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Annotated, Any

from fastapi import APIRouter
from pydantic import Field

from moevolve.evaluators.errors import UserError
from moevolve.evaluators.preparation.registry import list_tasks
from moevolve.search.config.run import SearchName
from moevolve.search.interface.export import CheckpointRequest, ExportRequest
from moevolve.search.interface.request import fields_of, one_line_errors
from moevolve.search.running.steer import unpause
from moevolve.search.server.api.requests import model_of, options_of
from moevolve.search.server.dependencies import CHANGES, RefPath, SearchPath, ServerDep
from moevolve.search.server.planning import LaunchPlan, RemoteLaunchRequest, look_up, plan_launch, start_launch
from moevolve.search.server.problems import WRITES
from moevolve.search.server.processes import RETRY_S, BusyError, Job
from moevolve.search.server.settings import ServerSettings
from moevolve.search.shrink.budget import budget_of
from moevolve.search.shrink.request import ShrinkRequest

_EXPORT_OPTIONS = tuple(fields_of(CheckpointRequest))
_CHOSEN_HERE = ("model", "data", "tasks", "output", "store", "overrides", "dry_run", "metric", "push", "public")
"""Parameters of a shrink that the server chooses, that are names here, that are programs, or that use its login."""
_SHRINK_OPTIONS = tuple(name for name in fields_of(ShrinkRequest) if name not in _CHOSEN_HERE)

Name = Annotated[str, Field(max_length=200)]


class RemoteShrinkRequest(model_of(ShrinkRequest, _SHRINK_OPTIONS)):  # type: ignore[misc]
    """A checkpoint to shrink, named as the server knows it.

    Attributes:
        name: Name of the search, and of the new folder in the server's folder for exports.
        model: Name of one of the server's checkpoints.
        data: Names of the server's files of requests.
        tasks: Names of tasks.
    """

    name: SearchName
    model: Name
    data: tuple[Name, ...] = ()
    tasks: tuple[Name, ...] = ()


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
    if server.processes.asked(record.name) == "paused":  # it has no driver yet
        server.processes.ask(record.name, None)
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


@routes.post("/shrinks", dependencies=[CHANGES], status_code=HTTPStatus.ACCEPTED)
def shrink(server: ServerDep, asked: RemoteShrinkRequest) -> Job:
    """Make a smaller checkpoint on the server's machine. Repeating the request continues an interrupted one."""
    return server.processes.start(asked.name, _shrink_command(asked, server.settings))


def _shrink_command(asked: RemoteShrinkRequest, settings: ServerSettings) -> list[str]:
    """Look up what a request names, and return the arguments of the `moevolve` command that answers it.

    Raises:
        UserError: The server has no such model, file of requests, task or folder for exports, or the request asks for
            no budget or several.
    """
    if settings.exports is None:
        raise UserError("this server has no folder for checkpoints; see `exports` in its settings")
    given: dict[str, Any] = asked.model_dump(exclude={"name"})
    given["model"] = look_up(given["model"], settings.models, "model")
    given["data"] = [look_up(name, settings.data, "data") for name in given["data"]]
    tasks = list_tasks()
    for name in given["tasks"]:
        look_up(name, tasks, "tasks")
    with one_line_errors():
        request = ShrinkRequest(**given, output=settings.exports.resolve() / asked.name)
    if not (request.data or request.tasks):
        raise UserError("data or tasks: name at least one that the checkpoint is for")
    budget_of(request)
    address = () if settings.address is None else ("--set", f"workers.address={settings.address}")
    options = [name for name in fields_of(ShrinkRequest) if name != "model"]
    return ["shrink", *options_of(ShrinkRequest, request, options), *address, "--", request.model]
