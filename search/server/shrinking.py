"""Shrinks that are asked for over the network: looked up by names that the server knows, checked, and started."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field
from starlette.concurrency import run_in_threadpool

from moevolve.evaluators.errors import UserError
from moevolve.evaluators.preparation.registry import list_tasks
from moevolve.search.config.run import SearchName
from moevolve.search.interface.request import fields_of, one_line_errors
from moevolve.search.server.api.requests import model_of, options_of
from moevolve.search.server.dependencies import ServerState
from moevolve.search.server.planning import look_up
from moevolve.search.server.processes import Job
from moevolve.search.server.settings import ServerSettings
from moevolve.search.shrink.request import ShrinkRequest, refuse_wrong
from moevolve.workers.children.process import ChildError, ChildProcess

_CHOSEN_HERE = ("model", "data", "tasks", "output", "store", "overrides", "dry_run", "metric", "push", "public")
"""Parameters of a shrink that the server chooses, that are names here, that are programs, or that publish."""
SHRINK_OPTIONS = tuple(name for name in fields_of(ShrinkRequest) if name not in _CHOSEN_HERE)
"""Parameters that a client may give as the command takes them."""

Name = Annotated[str, Field(max_length=200)]


class RemoteShrinkRequest(model_of(ShrinkRequest, SHRINK_OPTIONS)):  # type: ignore[misc]
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


async def start_shrink(asked: RemoteShrinkRequest, server: ServerState) -> Job:
    """Start the process that makes a smaller checkpoint. Repeating the request continues an interrupted one.

    Raises:
        UserError: The server has no such model, file of requests, task or folder for checkpoints, or the request is
            wrong whatever they are.
        BusyError: A process works on a search of this name.
        HTTPException: Status 503, if too many requests are being checked.
    """
    request = await run_in_threadpool(_resolve, asked, server.settings)
    await server.previews.run(refuse_in_child, server.preview_process, request)
    address = () if server.settings.address is None else ("--set", f"workers.address={server.settings.address}")
    options = [name for name in fields_of(ShrinkRequest) if name != "model"]
    command = ["shrink", *options_of(ShrinkRequest, request, options), *address, "--", request.model]
    return await run_in_threadpool(server.processes.start, asked.name, command)


def refuse_in_child(process: ChildProcess, request: ShrinkRequest) -> None:
    """Refuse a wrong request by what a child process finds, which may import what this one doesn't.

    Raises:
        UserError: The request is wrong, or finding that out fails.
    """
    try:
        process.call(refuse_wrong, request)
    except ChildError as error:
        raise UserError(f"checking the request failed: {error}; the server's log may have a reason") from None


def _resolve(asked: RemoteShrinkRequest, settings: ServerSettings) -> ShrinkRequest:
    """The request for what the names of a client's request stand for."""
    if settings.exports is None:
        raise UserError("this server has no folder for checkpoints; see `exports` in its settings")
    given: dict[str, Any] = asked.model_dump(exclude={"name"})
    given["model"] = look_up(given["model"], settings.models, "model")
    files, tasks = settings.data_files(), list_tasks()
    given["data"] = [look_up(name, files, "data") for name in given["data"]]
    for name in given["tasks"]:
        look_up(name, tasks, "tasks")
    if not (given["data"] or given["tasks"]):
        raise UserError("data or tasks: name at least one that the checkpoint is for")
    with one_line_errors():
        return ShrinkRequest(**given, output=settings.exports.resolve() / asked.name)
