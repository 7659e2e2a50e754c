"""Configurations as text: YAML files with overrides and presets, and the JSON that the store keeps."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from dataclasses import fields
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from moevolve.evaluators.errors import UserError, suggestion
from moevolve.evaluators.harness.files import split_name
from moevolve.evaluators.preparation.registry import split_fitness
from moevolve.evaluators.yaml_files import explain_validation, read_yaml
from moevolve.search.config.run import RunConfig
from moevolve.search.genomes.contract.phases import Section
from moevolve.store.errors import parsing
from moevolve.workers.contract.settings import EngineConfig, ModelConfig

# Keys of the sections that aren't a `Section`, which suggests its own keys.
_LOADING_KEYS = tuple(
    f"{section}.{field.name}"
    for section, kind in (("model", ModelConfig), ("engine", EngineConfig))
    for field in fields(kind)
)


def load_run_config(path: Path, overrides: tuple[str, ...] = ()) -> RunConfig:
    """Read a YAML file and apply `a.b=c` overrides.

    Model and task paths that begin with `.` are relative to the YAML's folder, other existing paths to the working
    directory.

    Raises:
        UserError: The file is missing, isn't YAML, or has an unknown key or a bad value; the message names the field.
    """
    data = read_yaml(path)
    if "base" in data and "methods" in data:
        raise UserError(f"{path}: this is a study: run it with `moevolve study`")
    chosen = [override for override in overrides if override.partition("=")[0] in (PRESET, "genome.kind")]
    for override in chosen:  # they say what the others may change
        apply_override(data, override)
    data = with_preset(data, str(path))
    for override in overrides:
        if override.partition("=")[0] != PRESET:
            apply_override(data, override)
    resolve_paths(data, path.parent)
    return parse_run_config(data, str(path))


def parse_run_config(data: dict[str, object], where: str) -> RunConfig:
    """Return the configuration of a search to run, from plain data as in YAML; `where` starts the error message.

    Raises:
        UserError: There is an unknown key, a bad value, or no tasks or phases; the message names the field.
    """
    config = _validated(data, where)
    lacking = [name for name in ("tasks", "phases") if not getattr(config, name)]
    if lacking:
        raise UserError(f"{where}: {'; '.join(f'{name}: expected 1 or more entries' for name in lacking)}")
    return config


def _validated(data: dict[str, object], where: str) -> RunConfig:
    try:
        return RunConfig.model_validate(data)
    except ValidationError as error:
        raise UserError(f"{where}: {explain_validation(error, data, _LOADING_KEYS)}") from None


def parse_stored_config(text: str, name: str) -> RunConfig:
    """Return the configuration of the stored search of a name, which may be an imported one.

    Raises:
        UserError: This version doesn't understand it, and the message names the field.
        DamagedError: It isn't a JSON object.
    """
    with parsing(f"the configuration of search {name}"):
        data = dict(json.loads(text))
    where = f"stored configuration of search {data.get('name', name)}"
    config = _validated(data, where)
    # Configurations are stored whole: today's defaults must not fill in settings that another version didn't have.
    if config.model_dump(mode="json") != data:
        raise UserError(f"{where}: settings are missing that this version of moevolve has; another one stored it")
    return config


def as_run_config(source: RunConfig | Path | str, overrides: Sequence[str]) -> RunConfig:
    """Apply `a.b=c` overrides to a configuration, or to the YAML file at a path; see `load_run_config`."""
    if isinstance(source, RunConfig):
        return changed_config(source, overrides, f"configuration of search {source.name}")
    return load_run_config(Path(source), tuple(overrides))


def changed_config(config: RunConfig, overrides: Sequence[str], where: str) -> RunConfig:
    """Apply `a.b=c` overrides to a configuration and check it again; `where` starts the error message.

    Raises:
        UserError: An override isn't `KEY=VALUE`, or gives an unknown key or a bad value; the message names the field.
    """
    data: dict[str, object] = config.model_dump(mode="json")
    for override in overrides:
        apply_override(data, override)
    return parse_run_config(data, where)


class Loading(Section):
    """The settings with which a stored search loads and runs its model."""

    model: ModelConfig
    engine: EngineConfig


def changed_loading(model: ModelConfig, engine: EngineConfig, overrides: Sequence[str]) -> Loading:
    """Apply `a.b=c` overrides to the settings of the model and the engine.

    Raises:
        UserError: An override isn't `KEY=VALUE`, names another section, or gives an unknown key or a bad value.
    """
    data = Loading(model=model, engine=engine).model_dump(mode="json")
    for override in overrides:
        if override.partition(".")[0] not in data:
            raise UserError(f"--set {override}: only `model.*` and `engine.*` settings may be given here")
        apply_override(data, override)
    try:
        return Loading.model_validate(data)
    except ValidationError as error:
        raise UserError(f"--set {' '.join(overrides)}: {explain_validation(error, data, _LOADING_KEYS)}") from None


def as_override(key: str, value: object) -> str:
    """Return the override that sets a key to plain data."""
    # JSON quotes text, which YAML might otherwise read as a number, a date or a boolean.
    return f"{key}={json.dumps(value)}"


def override_lines(overrides: Mapping[str, object] | Sequence[str]) -> tuple[str, ...]:
    """Overrides as `KEY=VALUE` lines; a mapping has dotted paths as keys."""
    if isinstance(overrides, Mapping):
        return tuple(as_override(key, value) for key, value in overrides.items())
    return tuple(overrides)


def apply_override(data: dict[str, object], override: str) -> None:
    """Set one `a.b.0.c=value` in plain configuration data; the value is read as YAML.

    Raises:
        UserError: There is no `=`, or a part of the path is neither a mapping nor a list.
    """
    for dotted, value in settings_of([override]).items():
        set_path(data, dotted, value, f"--set {override}")


def settings_of(overrides: Sequence[str]) -> dict[str, object]:
    """Return the values that `KEY=VALUE` overrides set, by dotted path; a `UserError` names a malformed one."""
    found = {}
    for override in overrides:
        dotted, separator, value = override.partition("=")
        if not separator or not all(dotted.split(".")):
            raise UserError(f"--set {override}: expected KEY=VALUE, for example --set genome.experts=4")
        try:
            found[dotted] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            message = " ".join(str(error).split())
            raise UserError(f"--set {override}: value is not valid YAML: {message}") from None
    return found


def set_path(data: dict[str, object], dotted: str, value: object, where: str) -> None:
    """Set `a.b.0.c` in plain configuration data; `where` starts the error message.

    Raises:
        UserError: A part of the path is neither a mapping nor a list.
    """
    keys = dotted.split(".")
    node: Any = data
    for depth, key in enumerate(keys):
        if isinstance(node, list):
            if not key.isdigit() or int(key) >= len(node):
                raise UserError(f"{where}: {'.'.join(keys[:depth])} has no entry {key!r} (0 to {len(node) - 1})")
            slot: int | str = int(key)
        elif isinstance(node, dict):
            slot = key
        else:
            raise UserError(f"{where}: {'.'.join(keys[:depth])} is a plain value, it has no {key!r}")
        if depth == len(keys) - 1:
            node[slot] = value
        else:
            node = node.setdefault(slot, {}) if isinstance(node, dict) else node[slot]


def resolve_paths(data: dict[str, object], folder: Path) -> None:
    """Make local paths of the model and tasks absolute, so that a configuration works from any folder."""
    model = data.get("model")
    if isinstance(model, dict) and isinstance(model.get("path"), str):
        model["path"] = _absolute(model["path"], folder)
    tasks = data.get("tasks")
    if isinstance(tasks, list):
        data["tasks"] = tasks = [{"name": task} if isinstance(task, str) else task for task in tasks]
        for task in tasks:
            if isinstance(task, dict) and isinstance(task.get("name"), str):
                task["name"] = _task_name(task["name"], folder)
    final = data.get("final")
    if isinstance(final, dict) and isinstance(final.get("held_out"), list):
        final["held_out"] = [_task_name(name, folder) if isinstance(name, str) else name for name in final["held_out"]]


def _task_name(name: str, folder: Path) -> str:
    base, fitness = split_fitness(name)
    prefix, base, metric = split_name(base)
    return prefix + _absolute(base, folder) + metric + fitness


def _absolute(path: str, folder: Path) -> str:
    if path.startswith("."):
        return str((folder / path).resolve())
    return str(Path(path).resolve()) if Path(path).exists() else path


def shipped_models() -> dict[str, str]:
    """Return the folders of the configs that come with the package, by name."""
    folder = Path(str(files("moevolve.configs"))) / "models"
    return {path.parent.name: str(path.parent) for path in sorted(folder.glob("*/config.json"))}


def find_model(name: str, option: str = "--model") -> str:
    """Resolve the name of a shipped config to its folder; a path or a hub id (with `/`) is returned unchanged.

    A `UserError` names the command-line `option` if a plain name is neither a folder nor a shipped config.
    """
    shipped = shipped_models()
    if Path(name).is_dir() or "/" in name:
        return name
    if name in shipped:
        return shipped[name]
    hint = suggestion(name, shipped)
    raise UserError(f"{option} {name}: no such folder, and no config of this name comes with moevolve; {hint}")


# Key of a run file that names a preset.
PRESET = "preset"
# Preset of run files that name none and have no phases.
DEFAULT_PRESET = "repaired"


def presets() -> dict[str, Path]:
    """Return the packaged presets by name."""
    folder = Path(str(files("moevolve.configs"))) / "presets"
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def with_preset(data: dict[str, object], where: str) -> dict[str, object]:
    """Return the content of a run file with the settings of the preset that it names; `where` starts the error message.

    Raises:
        UserError: There is no such preset, or it has nothing for this kind of genome.
    """
    own = {key: value for key, value in data.items() if key != PRESET}
    if PRESET in data:
        return filled(own, preset(data[PRESET], own, where))
    # Other kinds lack this preset; then validation reports the missing phases with all other faults.
    lacks = kind_of(own) not in (None, *read_yaml(presets()[DEFAULT_PRESET]))
    return own if "phases" in own or lacks else filled(own, preset(DEFAULT_PRESET, own, where))


def preset(name: object, data: Mapping[str, object], where: str) -> dict[str, object]:
    """Return the settings of a preset for the kind of genome of some configuration data, or of its first kind.

    See `with_preset`.
    """
    known = presets()
    if name not in known:
        raise UserError(f"{where}: {PRESET}: {name} is unknown; there are {', '.join(known)}")
    by_kind: dict[str, dict[str, object]] = read_yaml(known[name])
    kind = kind_of(data) or next(iter(by_kind))
    if kind not in by_kind:
        having = ", ".join(by_kind)
        raise UserError(
            f"{where}: {PRESET}: {name} is for genome kind {having}, not {kind}; set genome.kind, or write phases"
        )
    return filled({"genome": {"kind": kind}}, by_kind[kind])


def kind_of(data: Mapping[str, object]) -> str | None:
    """Return the genome kind that plain configuration data names; None if it names none."""
    genome = data.get("genome")
    return genome.get("kind") if isinstance(genome, Mapping) else None


def filled(data: Mapping[str, object], settings: Mapping[str, object]) -> dict[str, object]:
    """Return a copy of `data` with the settings it lacks; mappings are merged, and existing lists stay unchanged."""
    found = dict(data)
    for key, value in settings.items():
        if key not in found:
            found[key] = copy.deepcopy(value)
        elif isinstance(value, Mapping) and isinstance(own := found[key], Mapping):
            found[key] = filled(own, value)
    return found
