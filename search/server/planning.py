"""Launches that are asked for over the network: checked, resolved to a command, and planned or started.

A launch names a run file, a model and tasks that the server has, and changes settings from a fixed list. A path or URL
sent by a client is never opened.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, TypeVar

from pydantic import BaseModel, ConfigDict, Field
from starlette.concurrency import run_in_threadpool

from moevolve.evaluators.errors import UserError, suggestion
from moevolve.evaluators.preparation.registry import list_tasks
from moevolve.search.config.files import as_override, load_run_config, parse_stored_config
from moevolve.search.config.run import RunConfig, SearchName
from moevolve.search.report.contents import settings_text
from moevolve.search.running.plan.records import Estimate
from moevolve.search.running.set_up import check_settings, refuse_wrong
from moevolve.search.server.dependencies import ServerState
from moevolve.search.server.processes import Job
from moevolve.search.server.settings import ServerSettings
from moevolve.store.errors import NameTakenError, NotFoundError
from moevolve.store.reader import StoreReader

T = TypeVar("T")

# Settings and whole sections that a launch may change. None of them refers to a file or to another machine.
LAUNCH_SETTINGS = (
    *("seed", "window", "preset", "genome", "phases", "strategy", "task_aggregation", "tie_break"),
    *("final.rerank", "final.test", "final.random_baselines"),
    *("workers.count", "workers.num_cpus", "workers.num_gpus", "workers.timeout_s"),
)
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
        status: Status of the stored search with this name and these settings, which a launch would continue; None
            without one.
        settings: All settings as YAML.
        takes: What it takes, estimated without loading weights; None if the model is in no folder of this machine.
    """

    name: str
    status: str | None
    settings: str
    takes: Estimate | None


async def plan_launch(asked: RemoteLaunchRequest, server: ServerState) -> LaunchPlan:
    """Plan a launch; nothing is started.

    Raises:
        NotFoundError, UserError, NameTakenError: see `start_launch` and `estimated`.
        HTTPException: status 503, if too many plans are being made.
    """
    config, _, status = await run_in_threadpool(_checked, asked, server)
    takes = await server.checks.call(estimated, config)
    return LaunchPlan(config.name, status, settings_text(config.canonical_json(), config.name), takes)


def estimated(config: RunConfig) -> Estimate | None:
    """Estimate a run without asking the hub; None if its model is in no folder of this machine. It loads torch.

    Raises:
        UserError: The model is missing or doesn't suit the settings.
    """
    from moevolve.search.running.plan.estimate import estimate
    from moevolve.workers.checkpoints.files import local_directory
    from moevolve.workers.profiling.outline import outline_model

    if local_directory(config.model) is None:
        return None
    outline = outline_model(config.model)
    check_settings(config, outline.facts)
    return estimate(config, outline=outline, without_data=True)


def start_launch(asked: RemoteLaunchRequest, server: ServerState) -> Job:
    """Start the process that launches a search. Repeating it starts no second one.

    Raises:
        NotFoundError, UserError: see `resolve`; or the files of the model or of a task are wrong.
        NameTakenError: see `stored_status`.
        BusyError: a process launches it already.
    """
    config, command, _ = _checked(asked, server)
    return server.processes.start(config.name, command)


def _checked(asked: RemoteLaunchRequest, server: ServerState) -> tuple[RunConfig, list[str], str | None]:
    """Return what `resolve` does, with `stored_status`, after the checks of a check and of a launch alike."""
    config, command = resolve(asked, server.settings)
    refuse_wrong(config)
    return config, command, stored_status(server.store, config)


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
        if not any(key == allowed or key.startswith(f"{allowed}.") for allowed in LAUNCH_SETTINGS):
            raise UserError(f"overrides: {key!r} can't be set over the network; what can: {', '.join(LAUNCH_SETTINGS)}")
    changes: dict[str, object] = dict(asked.overrides)
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
    """Return what a name in a request stands for.

    Raises:
        UserError: The server knows no such name; the message names the field, `what`, and a similar name.
    """
    if name not in known:
        there = suggestion(name, known) if known else "its settings name none"
        raise UserError(f"{what}: the server knows no {name!r}: {there}")
    return known[name]


def stored_status(store: StoreReader, config: RunConfig) -> str | None:
    """Return the status of the stored search that a launch would continue; None if no search has this name.

    Raises:
        NameTakenError: a search of this name has other settings.
        UserError: another version of moevolve stored it.
    """
    try:
        record = store.search(config.name)
    except NotFoundError:
        return None
    if parse_stored_config(record.config, record.name).config_hash != config.config_hash:
        raise NameTakenError(f"search {config.name} has other settings; choose another name")
    return record.status
