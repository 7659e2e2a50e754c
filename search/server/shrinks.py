"""Shrinks on the server's machine: started from names that the server knows, and what their records say of them."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field
from starlette.concurrency import run_in_threadpool

from moevolve.evaluators.errors import UserError
from moevolve.evaluators.preparation.registry import list_tasks
from moevolve.search.config.run import SearchName
from moevolve.search.interface.control import StopRequest
from moevolve.search.interface.request import fields_of, one_line_errors
from moevolve.search.server.api.requests import model_of, options_of
from moevolve.search.server.dependencies import ServerState
from moevolve.search.server.planning import look_up
from moevolve.search.server.processes import Job
from moevolve.search.server.settings import ServerSettings
from moevolve.search.shrink.record import STAGES, ShrinkRecord, find_shrink
from moevolve.search.shrink.request import ShrinkRequest, refuse_wrong
from moevolve.store.errors import NotFoundError, NotRunningError
from moevolve.store.leases import is_gone
from moevolve.store.records import Control

# Parameters of a shrink that the server chooses, that are names here, or that are programs.
_CHOSEN_HERE = ("model", "data", "tasks", "output", "store", "overrides", "dry_run", "metric")
# Parameters that a client may give as the command takes them.
SHRINK_OPTIONS = tuple(name for name in fields_of(ShrinkRequest) if name not in _CHOSEN_HERE)
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


@dataclass(frozen=True, slots=True)
class ShrinkState:
    """How far a shrink is.

    Attributes:
        record: Its record; None while its process starts.
        job: Its process, if this server has started it.
        resumable: Whether this server can start it again: its checkpoint goes into the server's folder.
    """

    name: str
    record: ShrinkRecord | None
    job: Job | None
    resumable: bool = False

    @property
    def is_running(self) -> bool:
        """Whether it seems to go on, which can't be told of a process on another machine."""
        if self.job is not None:
            return self.job.running
        return self.record is not None and not self.record.is_over and not is_gone(self.record.owner)

    @property
    def state(self) -> str:
        """The state in one word."""
        if self.is_running:
            return "starting" if self.record is None else "running"
        if self.record is None or not self.record.is_over:
            return "stopped" if self.job is not None and self.job.stopped else "failed"
        return self.record.status

    @property
    def remark(self) -> str | None:
        """A line that explains the state; None if the state and the record say all."""
        if self.is_running or (self.record is not None and self.record.is_over):
            return None
        if self.job is None:
            return f"its process is gone{'; it can be resumed' if self.resumable else ''}"
        return None if self.job.stopped else f"its process ended with code {self.job.exit_code}"

    @property
    def actions(self) -> tuple[str, ...]:
        """What the server can do about it."""
        if self.is_running:
            return ("stop",)
        return ("resume",) if self.resumable and self.state in ("interrupted", "stopped", "failed") else ()

    @property
    def tone(self) -> Literal["live", "good", "quiet", "bad"]:
        """CSS class of the state."""
        tones: dict[str, Literal["live", "good", "quiet", "bad"]] = {
            "starting": "live",
            "running": "live",
            "finished": "good",
            "interrupted": "quiet",
            "stopped": "quiet",
        }
        return tones.get(self.state, "bad")

    @property
    def stage(self) -> str:
        """What was being done last."""
        return "" if self.record is None else STAGES[self.record.stage]

    @property
    def stages(self) -> list[tuple[str, float | None]]:
        """What was done, each with the seconds that it took, and what is being done, without."""
        if self.record is None:
            return []
        done: list[tuple[str, float | None]] = [(STAGES[each], took) for each, took in self.record.seconds.items()]
        return [*done, (STAGES[self.record.stage], None)] if self.is_running else done


def state_of(server: ServerState, name: str) -> ShrinkState:
    """Return the state of a shrink, given by its name or that of one of its searches.

    Raises:
        NotFoundError: There is none.
    """
    record = find_shrink(server.store, name)
    name = name if record is None else record.name
    job = server.processes.job(name) if server.processes.knows(name) else None
    job = job if job is not None and job.command == "shrink" else None
    if record is None and job is None:
        raise NotFoundError(f"no shrink {name!r}")
    return ShrinkState(name, record, job, record is not None and _is_here(record, server))


def _is_here(record: ShrinkRecord, server: ServerState) -> bool:
    exports = server.settings.exports
    return exports is not None and record.folder.parent == exports.resolve()


def process_of(server: ServerState, search: str) -> str:
    """Return the name of the process that makes a search, and of its log: the shrink's that made it, or its own."""
    record = find_shrink(server.store, search)
    return search if record is None else record.name


async def start_shrink(asked: RemoteShrinkRequest, server: ServerState) -> Job:
    """Start the process that makes a smaller checkpoint. Repeating the request continues an interrupted one.

    Raises:
        UserError: The server has no such model, file of requests, task or folder for checkpoints, or the request is
            wrong whatever they are.
        BusyError: A process works on a search of this name.
        HTTPException: Status 503, if too many requests are being checked.
    """
    request = await run_in_threadpool(_resolve, asked, server.settings)
    await server.checks.call(refuse_wrong, request)
    return await run_in_threadpool(server.processes.start, asked.name, _command(request))


def resume_shrink(search: str, server: ServerState) -> Job | None:
    """Continue the shrink that made a search, up to its checkpoint; None if this server's folder doesn't have it."""
    record = find_shrink(server.store, search)
    if record is None or not _is_here(record, server):
        return None
    given: dict[str, Any] = dict(record.asked)
    with one_line_errors():
        request = ShrinkRequest(**given)
    return server.processes.start(record.name, _command(request))


def stop_shrink(name: str, server: ServerState) -> Control:
    """Ask for the end of a shrink, or end its process where it has no search yet. It can be resumed.

    Raises:
        NotFoundError: There is no such shrink.
        NotRunningError: It isn't running, or another server has started it and it isn't searching.
    """
    state = state_of(server, name)
    record = state.record
    if record is not None and record.search is not None:
        with suppress(NotFoundError, NotRunningError):
            return StopRequest(record.search).answer(server.writer)
    control = server.processes.stop(server.writer, state.name)
    if control is None:
        why = "it isn't searching, and this server hasn't started its process; end that where it runs"
        raise NotRunningError(f"shrink {state.name}: {why if state.is_running else 'it is ' + state.state}")
    return control


def _command(request: ShrinkRequest) -> list[str]:
    options = [name for name in fields_of(ShrinkRequest) if name != "model"]
    return ["shrink", *options_of(ShrinkRequest, request, options), "--", request.model]


def _resolve(asked: RemoteShrinkRequest, settings: ServerSettings) -> ShrinkRequest:
    """Return the request for what the names of a client's request stand for."""
    if settings.exports is None:
        raise UserError("this server has no folder for checkpoints; see `exports` in its settings")
    given = asked.model_dump(exclude={"name"})
    given["model"] = look_up(given["model"], settings.models, "model")
    files, tasks = settings.data_files(), list_tasks()
    given["data"] = [look_up(name, files, "data") for name in given["data"]]
    for name in given["tasks"]:
        look_up(name, tasks, "tasks")
    if not (given["data"] or given["tasks"]):
        raise UserError("data or tasks: name at least one that the checkpoint is for")
    with one_line_errors():
        return ShrinkRequest(**given, output=settings.exports.resolve() / asked.name)
