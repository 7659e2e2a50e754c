"""The route that shrinks a checkpoint on the server's machine, for requests or tasks that the server knows by name."""

from __future__ import annotations

from http import HTTPStatus
from typing import Annotated, Any

from fastapi import APIRouter
from pydantic import Field

from moevolve.evaluators.errors import UserError
from moevolve.evaluators.preparation.registry import list_tasks
from moevolve.search.config.run import SearchName
from moevolve.search.requests.record import fields_of, one_line_errors
from moevolve.search.requests.shrink import ShrinkRequest
from moevolve.search.server.api.requests import model_of, options_of
from moevolve.search.server.dependencies import CHANGES, ServerDep
from moevolve.search.server.planning import look_up
from moevolve.search.server.problems import WRITES
from moevolve.search.server.processes import Job
from moevolve.search.server.settings import ServerSettings
from moevolve.search.shrink.budget import budget_of

_OWN = ("model", "data", "tasks", "output", "store", "overrides", "dry_run")
"""Parameters that the server chooses, or that are names here."""

Name = Annotated[str, Field(max_length=200)]

routes = APIRouter(tags=["launching"], responses=WRITES)


class RemoteShrinkRequest(model_of(ShrinkRequest, [name for name in fields_of(ShrinkRequest) if name not in _OWN])):  # type: ignore[misc]
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


@routes.post("/shrinks", dependencies=[CHANGES], status_code=HTTPStatus.ACCEPTED)
def shrink(server: ServerDep, asked: RemoteShrinkRequest) -> Job:
    """Make a smaller checkpoint on the server's machine. Repeating the request continues an interrupted one."""
    return server.processes.start(asked.name, arguments_of(asked, server.settings))


def arguments_of(asked: RemoteShrinkRequest, settings: ServerSettings) -> list[str]:
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
