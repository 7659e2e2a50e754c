"""What a search that is asked for by names would run as, and what that takes: looked up, checked and counted.

A request names a run file, a model and tasks that the server has, and settings that may be changed over the network.
No path or URL of a client's ever opens anything.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from moevolve.evaluators.errors import UserError
from moevolve.evaluators.preparation.registry import list_tasks
from moevolve.search.config.files import as_override, load_run_config, parse_stored_config
from moevolve.search.config.run import RunConfig, SearchName
from moevolve.search.estimate.counts import ModelSize, PhaseCount, count_run, final_evaluations
from moevolve.search.report.contents import settings_text
from moevolve.search.running.weights import outline_local
from moevolve.search.server.service import Service
from moevolve.search.server.settings import ServerSettings
from moevolve.store.errors import NameTakenError, NotFoundError
from moevolve.store.lineage import suggestion
from moevolve.store.reader import StoreReader
from moevolve.store.records import SearchRecord

T = TypeVar("T")

FREE = (
    *("seed", "window", "preset", "genome", "phases", "strategy", "tie_break", "final.rerank", "final.test"),
    *(
        "final.random_baselines",
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
    name: SearchName | None = None
    model: Annotated[str, Field(max_length=200)] | None = None
    tasks: Annotated[list[Annotated[str, Field(max_length=200)]], Field(min_length=1, max_length=100)] | None = None
    overrides: dict[
        Annotated[str, Field(max_length=200, pattern=r"^[a-z0-9_.]+$")], bool | int | float | str | None
    ] = Field(default_factory=dict, max_length=100)


@dataclass(frozen=True, slots=True)
class Resolved:
    """A launch that was asked for, by what its names stand for on the server's machine.

    Attributes:
        path: of the run file.
        changes: of its settings, as the command line has them.
        config: the settings, with the search's name and the server's store.
    """

    path: Path
    changes: tuple[str, ...]
    config: RunConfig

    @property
    def arguments(self) -> list[str]:
        """Of the command that launches it."""
        flags = [part for change in self.changes for part in ("--set", change)]
        return ["launch", str(self.path), "--name", self.config.name, "--or-resume", *flags]


@dataclass(frozen=True, slots=True)
class Plan:
    """What would be launched, as far as that is known without weights and without the tasks' data.

    Attributes:
        name: of the search.
        status: of the search of this name and these settings that is in the store, and would go on; None without one.
        settings: all of them, as YAML.
        phases: how many individuals each has, and how many different ones there can be at most.
        ranked: individuals that are scored on `dev` at the end.
        tested: models that are scored on `test` at the end, the full one included.
        sizes: the full model, and a candidate of each kind of phase; none if the model's config isn't on this machine.
        weight_bytes: of the full model as a worker loads it; None where it has no sizes.
    """

    name: str
    status: str | None
    settings: str
    phases: tuple[PhaseCount, ...]
    ranked: int
    tested: int
    sizes: tuple[ModelSize, ...]
    weight_bytes: int | None


def make_plan(asked: LaunchRequest, service: Service) -> Plan:
    """What a request would launch.

    Raises:
        NotFoundError, UserError: as `resolve`, or the model isn't there, or can't have such genomes.
        NameTakenError: as `status_of`.
    """
    config = resolve(asked, service.settings).config
    status = status_of(service.store, config)
    phases = tuple(PhaseCount(phase.kind, phase.evaluations, phase.evaluations) for phase in config.phases)
    sizes: tuple[ModelSize, ...] = ()
    outline = outline_local(config.model)
    if outline is not None:
        sizes, phases = count_run(config, outline)
    ranked, tested = final_evaluations(config)
    weight_bytes = None if outline is None else outline.weight_bytes
    text = settings_text(config.canonical_json())
    return Plan(config.name, status, text, phases, ranked, tested, sizes, weight_bytes)


def resolve(asked: LaunchRequest, settings: ServerSettings) -> Resolved:
    """The run file that a request names, and what it changes of it.

    Raises:
        NotFoundError: the server has no such run file.
        UserError: it may not change that, the server has no such model or task, or a setting is wrong.
    """
    files = settings.run_files()
    if asked.configuration not in files:
        raise NotFoundError(f"no configuration {asked.configuration!r}: {suggestion(asked.configuration, files)}")
    for key in asked.overrides:
        if not _is_free(key):
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
    path, flags = files[asked.configuration], tuple(as_override(key, value) for key, value in changes.items())
    config = load_run_config(path, flags)
    return Resolved(path, flags, config.model_copy(update={"name": asked.name or config.name, "store": settings.store}))


def _known(name: str, known: Mapping[str, T], what: str) -> T:
    if name not in known:
        raise UserError(f"{what}: the server knows no {name!r}: {suggestion(name, known)}")
    return known[name]


def status_of(store: StoreReader, config: RunConfig) -> str | None:
    """The status of the stored search that a launch would go on with; None if there is none of its name.

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


def request_like(search: SearchRecord, settings: ServerSettings) -> LaunchRequest | None:
    """What to ask for to launch a stored search's settings again: of the run file that takes the fewest changes.

    None if no run file gives them with what a launch may change.

    Raises:
        UserError: another version of moevolve stored it.
    """
    stored = parse_stored_config(search.config)
    found = []
    for name, path in settings.run_files().items():
        try:
            asked = _difference(name, load_run_config(path), stored, settings)
            same = resolve(asked, settings).config.config_hash == stored.config_hash
        except (UserError, NotFoundError, ValidationError):
            continue
        if same:
            found.append(asked)
    return min(found, key=lambda asked: len(asked.overrides), default=None)


_NOT_COMPARED = ("name", "store", "workers.address", "model.revision", "model.own_dtype")


def _difference(name: str, given: RunConfig, stored: RunConfig, settings: ServerSettings) -> LaunchRequest:
    """What to change of a run file for stored settings, as far as that can be asked for."""
    before, after = (dict(_leaves("", config.model_dump(mode="json"))) for config in (given, stored))
    changed = {key: value for key, value in after.items() if key not in before or before[key] != value}
    changed = {key: value for key, value in changed.items() if key not in _NOT_COMPARED}
    models = [known for known, path in settings.models.items() if path == changed.get("model.path")]
    tasks = [after[key] for key in after if re.fullmatch(r"tasks\.\d+\.name", key)]
    return LaunchRequest(
        configuration=name,
        model=models[0] if models else None,
        tasks=tasks if any(key.startswith("tasks.") for key in changed) else None,
        overrides={key: value for key, value in changed.items() if _is_free(key)},
    )


def _leaves(path: str, data: Any) -> Iterator[tuple[str, Any]]:
    """Every plain value in a configuration, by its dotted path."""
    if not isinstance(data, dict | list):
        yield path, data
        return
    for key, value in data.items() if isinstance(data, dict) else enumerate(data):
        yield from _leaves(f"{path}.{key}" if path else str(key), value)


def _is_free(key: str) -> bool:
    """Whether a launch may change a setting."""
    return any(key == free or key.startswith(f"{free}.") for free in FREE)
