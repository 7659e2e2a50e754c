"""Launches and shrinks that are asked for over the network: checked, resolved to a command, and planned or started.

A launch names a run file, a model and tasks that the server has, and changes settings from a fixed list; a shrink names
a model, files of requests and tasks. A path or URL sent by a client is never opened.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field
from starlette.concurrency import run_in_threadpool

from moevolve.evaluators.errors import UserError, suggestion
from moevolve.evaluators.preparation.registry import list_tasks
from moevolve.search.config.files import as_override, load_run_config, parse_stored_config
from moevolve.search.config.run import RunConfig, SearchName
from moevolve.search.interface.request import fields_of, one_line_errors
from moevolve.search.report.contents import settings_text
from moevolve.search.running.plan.preview import Preview, preview
from moevolve.search.server.api.requests import model_of, options_of
from moevolve.search.server.dependencies import ServerState
from moevolve.search.server.processes import Job
from moevolve.search.server.settings import ServerSettings
from moevolve.search.shrink.request import ShrinkRequest, refuse_wrong
from moevolve.store.errors import NameTakenError, NotFoundError
from moevolve.store.reader import StoreReader
from moevolve.workers.children.process import ChildError, ChildProcess

T = TypeVar("T")

LAUNCH_SETTINGS = (
    *("seed", "window", "preset", "genome", "phases", "strategy", "task_aggregation", "tie_break"),
    *("final.rerank", "final.test", "final.random_baselines"),
    *("workers.count", "workers.num_cpus", "workers.num_gpus", "workers.timeout_s"),
)
"""Settings and whole sections that a launch may change. None of them refers to a file or to another machine."""
_CHOSEN_HERE = ("model", "data", "tasks", "output", "store", "overrides", "dry_run", "metric", "push")
"""Parameters of a shrink that the server chooses, that are names here, that are programs, or that publish."""
SHRINK_OPTIONS = tuple(name for name in fields_of(ShrinkRequest) if name not in _CHOSEN_HERE)
"""Parameters that a client may give as the command takes them."""
Name = Annotated[str, Field(max_length=200)]


class RemoteLaunchRequest(BaseModel):
    """A search to launch on the server's machine.

    Attributes:
        configuration: Name of one of the server's run files.
        name: Name of the search; None takes the run file's, as for the others.
        model: Name of one of the server's checkpoints.
        tasks: Names of tasks.
        overrides: Further settings by dotted path.
    """

    model_config = ConfigDict(extra="forbid")
    configuration: Name
    name: SearchName | None = None
    model: Name | None = None
    tasks: Annotated[list[Name], Field(min_length=1, max_length=100)] | None = None
    overrides: dict[
        Annotated[str, Field(max_length=200, pattern=r"^[a-z0-9_.]+$")], bool | int | float | str | None
    ] = Field(default_factory=dict, max_length=100)


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """What a launch would run.

    Attributes:
        status: Status of the stored search with this name and these settings, which a launch would continue; None if
            there is none.
        settings: All settings as YAML.
        takes: What it takes, as far as that is known without loading weights.
    """

    name: str
    status: str | None
    settings: str
    takes: Preview


async def plan_launch(asked: RemoteLaunchRequest, server: ServerState) -> LaunchPlan:
    """Plan a launch; nothing is started.

    Raises:
        NotFoundError, UserError: see `resolve`; also, the model is missing or doesn't fit the genome's settings.
        NameTakenError: see `stored_status`.
        HTTPException: status 503, if too many plans are being made.
    """

    def check() -> tuple[RunConfig, str | None]:
        config, _ = resolve(asked, server.settings)
        return config, stored_status(server.store, config)

    config, status = await run_in_threadpool(check)
    takes = await server.previews.run(previewed, server.preview_process, config)
    return LaunchPlan(config.name, status, settings_text(config.canonical_json()), takes)


def previewed(process: ChildProcess, config: RunConfig) -> Preview:
    """Preview a run in a child process.

    Raises:
        UserError: The model is missing or doesn't fit the genome's settings, or counting fails or takes too long.
    """
    try:
        return process.call(preview, config)
    except ChildError as error:
        raise UserError(
            f"search {config.name}: counting what it takes failed: {error}; the server's log may have a reason, and "
            "`moevolve plan` counts without a limit"
        ) from None


def start_launch(asked: RemoteLaunchRequest, server: ServerState) -> Job:
    """Start the process that launches a search. Repeating it starts no second one.

    Raises:
        NotFoundError, UserError: see `resolve`.
        NameTakenError: see `stored_status`.
        BusyError: a process launches it already.
    """
    config, command = resolve(asked, server.settings)
    stored_status(server.store, config)
    return server.processes.start(config.name, command)


def resolve(asked: RemoteLaunchRequest, settings: ServerSettings) -> tuple[RunConfig, list[str]]:
    """Look up what a request names, and make its configuration and the arguments of the command that launches it.

    Raises:
        NotFoundError: the server has no such run file.
        UserError: a setting may not be changed or is wrong, or the server has no such model or task.
    """
    files = settings.run_files()
    if asked.configuration not in files:
        raise NotFoundError(f"no configuration {asked.configuration!r}: {suggestion(asked.configuration, files)}")
    for key in asked.overrides:
        if not _may_change(key):
            raise UserError(f"overrides: {key!r} can't be set over the network; what can: {', '.join(LAUNCH_SETTINGS)}")
    changes: dict[str, Any] = dict(asked.overrides)
    if asked.model is not None:
        changes["model.path"] = look_up(asked.model, settings.models, "model")
    if asked.tasks is not None:
        tasks = list_tasks()
        for task in asked.tasks:
            look_up(task, tasks, "tasks")
        changes["tasks"] = asked.tasks
    path, overrides = files[asked.configuration], tuple(as_override(key, value) for key, value in changes.items())
    config = load_run_config(path, overrides)
    name = asked.name or config.name
    flags = [word for override in overrides for word in ("--set", override)]
    command = ["launch", str(path), "--name", name, "--or-resume", *flags]
    return config.model_copy(update={"name": name, "store": settings.store}), command


def look_up(name: str, known: Mapping[str, T], what: str) -> T:
    """What a name in a request stands for.

    Raises:
        UserError: The server knows no such name; the message names the field, `what`, and a similar name.
    """
    if name not in known:
        there = suggestion(name, known) if known else "its settings name none"
        raise UserError(f"{what}: the server knows no {name!r}: {there}")
    return known[name]


def stored_status(store: StoreReader, config: RunConfig) -> str | None:
    """The status of the stored search that a launch would continue; None if no search has this name.

    Raises:
        NameTakenError: a search of this name has other settings.
        UserError: another version of moevolve stored it.
    """
    try:
        record = store.search(config.name)
    except NotFoundError:
        return None
    if parse_stored_config(record.config).config_hash != config.config_hash:
        raise NameTakenError(f"search {config.name} has other settings; choose another name")
    return record.status


def _may_change(key: str) -> bool:
    return any(key == allowed or key.startswith(f"{allowed}.") for allowed in LAUNCH_SETTINGS)


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
    options = [name for name in fields_of(ShrinkRequest) if name != "model"]
    command = ["shrink", *options_of(ShrinkRequest, request, options), "--", request.model]
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
