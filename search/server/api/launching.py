"""Starting things on the server's machine: searches, going on with them, exports. All of it by names it knows."""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field

from moevolve.evaluators.errors import UserError
from moevolve.evaluators.tasks.registry import list_tasks
from moevolve.search.config.files import as_override, load_run_config, parse_stored_config
from moevolve.search.config.run import RunConfig
from moevolve.search.server.api.parameters import RefPath, SearchPath
from moevolve.search.server.drivers import Launch
from moevolve.search.server.problems import WRITES
from moevolve.search.server.service import ServiceDep
from moevolve.search.server.settings import ServerSettings
from moevolve.search.service.steer import unpaused
from moevolve.store.errors import NameTakenError, NotFoundError
from moevolve.store.lineage import nearest
from moevolve.store.repository import Store

T = TypeVar("T")

FREE = (
    *("seed", "window", "preset", "genome", "phases", "strategy", "tie_break", "final.rerank", "final.test"),
    *(
        "final.random_draws",
        "workers.count",
        "workers.num_cpus",
        "workers.num_gpus",
        "workers.timeout_s",
        "workers.min",
        "workers.max",
        "workers.priority",
    ),
)
"""Settings that a launch may change, with all that is in them: none of them leads to a file or to another machine."""
_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"


class LaunchRequest(BaseModel):
    """A search to launch.

    Attributes:
        configuration: name of a run file that the server has.
        name: of the search; None takes the run file's.
        model: name of a checkpoint that the server has; None takes the run file's.
        tasks: names of tasks; None takes the run file's.
        overrides: further settings, by dotted path.
    """

    model_config = ConfigDict(extra="forbid")
    configuration: Annotated[str, Field(max_length=200)]
    name: Annotated[str, Field(max_length=200, pattern=_NAME)] | None = None
    model: Annotated[str, Field(max_length=200)] | None = None
    tasks: Annotated[list[Annotated[str, Field(max_length=200)]], Field(min_length=1, max_length=100)] | None = None
    overrides: dict[
        Annotated[str, Field(max_length=200, pattern=r"^[a-z0-9_.]+$")], bool | int | float | str | None
    ] = Field(default_factory=dict, max_length=100)


class ExportRequest(BaseModel):
    """In which form to export; None takes `stock` where that is exact."""

    model_config = ConfigDict(extra="forbid")
    form: Literal["stock", "native"] | None = None


routes = APIRouter(tags=["launching"], responses=WRITES)


@routes.get("/configurations")
def list_configurations(service: ServiceDep) -> list[str]:
    """Names of run files that can be launched."""
    return sorted(service.settings.run_files())


@routes.get("/models")
def list_models(service: ServiceDep) -> list[str]:
    """Names of checkpoints that a launch may have in place of its run file's."""
    return sorted(service.settings.models)


@routes.get("/launches")
def list_launches(service: ServiceDep) -> list[Launch]:
    """What was started since the server was, and what became of it."""
    return service.drivers.launches()


@routes.post("/searches", status_code=HTTPStatus.ACCEPTED)
def launch(service: ServiceDep, asked: LaunchRequest) -> Launch:
    """Launch a search on the server's machine. Asking for the same again starts nothing new."""
    path, changes = _resolved(asked, service.settings)
    config = load_run_config(path, changes)
    name = asked.name or config.name
    _check_name(service.store, name, config)
    flags = [part for change in changes for part in ("--set", change)]
    return service.drivers.start(name, ["launch", str(path), "--name", name, "--or-resume", *flags])


@routes.post("/searches/{search}/resume", status_code=HTTPStatus.ACCEPTED)
def resume(service: ServiceDep, search: SearchPath) -> Launch | None:
    """Let a paused search go on where it runs (null), or continue one that nobody runs, here."""
    record = service.store.search(search)
    if unpaused(service.store, record.id):
        return None
    if record.status in ("finished", "cancelled"):
        raise UserError(f"search {record.name} is {record.status}")
    address = [] if service.settings.address is None else ["--address", service.settings.address]
    return service.drivers.start(record.name, ["resume", record.name, *address])


@routes.post("/individuals/{ref}/export", status_code=HTTPStatus.ACCEPTED)
def export(service: ServiceDep, ref: RefPath, asked: ExportRequest) -> Launch:
    """Write an individual as a checkpoint into the server's folder for exports."""
    if service.settings.exports is None:
        raise UserError("this server has no folder for exports; see `exports` in its settings")
    found = service.store.individual(ref)
    target = service.settings.exports.resolve() / found.ref.replace(":", "-")
    form = [] if asked.form is None else ["--form", asked.form]
    return service.drivers.start(found.ref, ["export", found.ref, str(target), *form])


def _resolved(asked: LaunchRequest, settings: ServerSettings) -> tuple[Path, tuple[str, ...]]:
    """The run file that a request names, and what it changes of it, as the command line has it.

    Raises:
        NotFoundError: the server has no such run file.
        UserError: it may not change that, or the server has no such model or task.
    """
    files = settings.run_files()
    if asked.configuration not in files:
        raise NotFoundError(f"no configuration {asked.configuration!r}: {nearest(asked.configuration, files)}")
    for key in asked.overrides:
        if not any(key == free or key.startswith(f"{free}.") for free in FREE):
            raise UserError(f"overrides: {key!r} can't be set over the network; what can: {', '.join(FREE)}")
    changes: dict[str, Any] = dict(asked.overrides)
    if asked.model is not None:
        changes["model.path"] = _known(asked.model, settings.models, "model")
    if asked.tasks is not None:
        tasks = list_tasks()
        for task in asked.tasks:
            _known(task, tasks, "tasks")
        changes["tasks"] = asked.tasks
    if settings.address is not None:
        changes["workers.address"] = settings.address
    return files[asked.configuration], tuple(as_override(key, value) for key, value in changes.items())


def _known(name: str, known: Mapping[str, T], what: str) -> T:
    if name not in known:
        raise UserError(f"{what}: the server knows no {name!r}: {nearest(name, known)}")
    return known[name]


def _check_name(store: Store, name: str, config: RunConfig) -> None:
    """Raises NameTakenError where a search of this name has other settings."""
    try:
        stored = parse_stored_config(store.search(name).config)
    except NotFoundError:
        return
    if stored.config_hash != config.config_hash:
        raise NameTakenError(f"search {name} has other settings; choose another name")
