"""Configuration of a study: a base run configuration, and the settings varied in it."""

from __future__ import annotations

import copy
import itertools
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from pydantic import Field, ValidationError, field_validator

from moevolve.evaluators.errors import UserError
from moevolve.evaluators.records import short_repr
from moevolve.evaluators.yaml_files import explain_validation, read_yaml
from moevolve.search.config.files import (
    PRESET,
    apply_override,
    filled,
    parse_run_config,
    preset,
    resolve_paths,
    set_path,
    with_preset,
)
from moevolve.search.config.run import RunConfig
from moevolve.search.genomes.contract.phases import START, Section
from moevolve.search.genomes.registry import DEFAULT, KINDS

# Key that makes a method a one-shot baseline instead of a search.
BASELINE = "baseline"
# Key that makes a baseline a repaired one: settings, or `true`.
REPAIR = "repair"
# Key of a base that names a run, whose settings it has besides its own.
FROM = "from"

# Settings by dotted path, for example `genome.experts`, that replace the base's.
Changes = dict[str, object]


class StudySection(Section):
    """A study as its YAML file has it: every method on every task at every budget, with every seed.

    Attributes:
        name: Prefix of the names of its searches in the store.
        base: Run configuration without its name, or the path of one; `from: PATH` in it fills in what it lacks.
        tasks: Tasks by label, each searched on by itself; several tasks under one label share a search. None takes the
            base's tasks for one search.
        budgets: Settings by label, applied to every method.
        methods: Settings by label that are compared. `baseline: NAME` makes a method the one-shot baseline of that
            name; `repair: true`, or settings of a repair, repairs it.
        seeds: Seeds; each gives one search, and scores are means over them.
    """

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]*$")
    base: dict[str, object]
    tasks: Annotated[dict[str, list[object]], Field(min_length=1)] | None = None
    budgets: Annotated[dict[str, Changes], Field(min_length=1)] = Field({"": {}})
    methods: Annotated[dict[str, Changes], Field(min_length=1)]
    seeds: tuple[Annotated[int, Field(ge=0)], ...] = Field((0,), min_length=1)

    @field_validator("tasks", mode="before")
    @classmethod
    def _by_label(cls, value: object) -> object:
        """A plain list gives every task a search of its own."""
        if not isinstance(value, list):
            return value
        return {str(task.get("name") if isinstance(task, dict) else task): [task] for task in value}

    @field_validator("methods", "budgets", mode="before")
    @classmethod
    def _unchanged(cls, value: object) -> object:
        """Return a label without settings changes nothing."""
        return {k: v if v is not None else {} for k, v in value.items()} if isinstance(value, dict) else value


@dataclass(frozen=True, slots=True)
class StudyCell:
    """One search of a study.

    Attributes:
        task, budget, method: Labels; task and budget are empty if the study doesn't vary them.
        config: Configuration of the search.
    """

    task: str
    budget: str
    method: str
    baseline: bool
    config: RunConfig = field(repr=False)


@dataclass(frozen=True, slots=True)
class Study:
    """A validated study: its name, and all searches, ordered by task, then budget, method and seed."""

    __repr__ = short_repr

    name: str
    cells: tuple[StudyCell, ...]

    @property
    def store(self) -> str:
        return self.cells[0].config.store


def load_study(path: Path, overrides: tuple[str, ...] = ()) -> Study:
    """Read a study's YAML file, apply overrides such as `base.workers.count=4`, and validate every cell.

    Raises:
        UserError: the file is missing, isn't YAML, or has an unknown key or a wrong value; the message names the field.
    """
    data = read_yaml(path)
    if "phases" in data and "methods" not in data:
        raise UserError(f"{path}: this is one search, not a study: run it with `moevolve launch`")
    base = data.get("base")
    own: dict[str, object] = base if isinstance(base, dict) else {FROM: base}
    if isinstance(named := own.get(FROM), str):
        source = path.parent / named
        run = read_yaml(source)
        resolve_paths(run, source.parent)
        data["base"] = filled({key: value for key, value in own.items() if key != FROM}, run)
    for override in overrides:
        apply_override(data, override)
    try:
        section = StudySection.model_validate(data)
    except ValidationError as error:
        raise UserError(f"{path}: {explain_validation(error, data)}") from None
    cells = tuple(_cells(section, path))
    [(name, count)] = Counter(cell.config.name for cell in cells).most_common(1)
    if count > 1:
        raise UserError(f"{path}: two labels give the same name {name}; labels must differ in letters or digits")
    return Study(section.name, cells)


def _cells(section: StudySection, path: Path) -> Iterator[StudyCell]:
    tasks: dict[str, list[object] | None] = {"": None} if section.tasks is None else {**section.tasks}
    for (task, sections), (budget, shared), (method, own), seed in itertools.product(
        tasks.items(), section.budgets.items(), section.methods.items(), section.seeds
    ):
        labels = [re.sub(r"[^A-Za-z0-9]+", "-", label).strip("-") for label in (task, budget, method) if label]
        data = copy.deepcopy(section.base)
        data["name"] = ".".join([section.name, *labels, f"s{seed}"])
        data["seed"] = seed
        if sections is not None:
            data["tasks"] = copy.deepcopy(sections)
        where = f"{path}: {' / '.join(label for label in (task, budget, method) if label)}"
        baseline, kind = own.get(BASELINE), _kind(own, shared, data)
        set_path(data, "genome.kind", kind, where)
        # An unknown kind is reported below, with all other settings.
        one_shot: Changes = {}
        if baseline is not None and kind in KINDS:
            one_shot = _one_shot(str(baseline), kind, data, where, own)
        elif REPAIR in own:
            raise UserError(f"{where}: repair: it goes with a baseline; a search has `repair` in its phases")
        # A preset named by the method takes precedence over the base.
        data = filled(preset(own[PRESET], data, where), data) if PRESET in own else with_preset(data, where)
        for settings in (shared, one_shot, own):
            for key in (key for key in settings if key not in (BASELINE, REPAIR, PRESET)):
                set_path(data, key, copy.deepcopy(settings[key]), where)
        resolve_paths(data, path.parent)
        yield StudyCell(task, budget, method, baseline is not None, parse_run_config(data, where))


def _kind(*settings: Mapping[str, object]) -> str:
    """Return the genome kind in the first of the settings that names one."""
    for each in settings:
        genome = each.get("genome")
        if "genome.kind" in each:
            return str(each["genome.kind"])
        if isinstance(genome, dict):
            return str(genome.get("kind", DEFAULT))
    return DEFAULT


def _one_shot(name: str, kind: str, data: Mapping[str, object], where: str, own: Changes) -> Changes:
    """Return the settings that make a search a one-shot baseline: its only individual, or all random draws.

    Settings follow the baseline's paper (`GenomeKind.baseline_settings`). The method's own settings may add a repair
    and the number of draws. A baseline is scored on `dev`, where the best baseline is chosen, unless the base sets
    `final.rerank` to 0.
    """
    final = data.get("final")
    final = final if isinstance(final, dict) else {}
    known = KINDS[kind].baselines
    first = KINDS[kind].section.phase_kinds[0]
    phase: dict[str, object] = {"kind": first, "init": [name]} | {key: own[key] for key in (REPAIR,) if key in own}
    form = dict(KINDS[kind].baseline_settings)
    if name == "random":
        draws = own.get("final.random_baselines", final.get("random_baselines")) or 20
        phase |= {"evaluations": draws, "initial": draws}
        return form | {"phases": [phase], "strategy": "evolution", "final.rerank": 0, "final.random_baselines": draws}
    plain = ("random", START) if first == "tune" else ("random",)
    if name not in known and name not in plain:
        raise UserError(f"{where}: baseline: {name} is unknown; there are {', '.join((*plain, *known))}")
    phase |= {"evaluations": 1, "initial": 1}
    rerank = 0 if final.get("rerank") == 0 else 1
    return form | {"phases": [phase], "strategy": "evolution", "final.rerank": rerank, "final.random_baselines": 0}
