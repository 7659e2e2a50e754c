"""Presets: settings that a run file takes over by name, where it doesn't have its own."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from moevolve.evaluators.errors import UserError
from moevolve.evaluators.yaml_files import read_yaml
from moevolve.search.genomes.registry import DEFAULT

PRESET = "preset"
"""Key of a run file that names one."""
BEST = "best"
"""What a run file gets that names none and has no phases."""


def presets() -> dict[str, Path]:
    """The packaged presets by name."""
    folder = Path(str(files("moevolve.configs"))) / "presets"
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def with_preset(data: dict[str, Any], where: str) -> dict[str, Any]:
    """Plain configuration data with what the preset that it names adds to it.

    Args:
        data: of a run file; left as it is.
        where: heads the error message.

    Raises:
        UserError: there is no such preset, or it has nothing for this kind of genome.
    """
    own = {key: value for key, value in data.items() if key != PRESET}
    if PRESET in data:
        return filled(own, preset(data[PRESET], own, where))
    # Of a kind that has no best one the lack of phases is said with whatever else is missing.
    return own if "phases" in own else filled(own, read_yaml(presets()[BEST]).get(kind_of(own), {}))


def preset(name: Any, data: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The settings of a preset for the kind of genome of some configuration data.

    Raises:
        UserError: as `with_preset`.
    """
    known = presets()
    if name not in known:
        raise UserError(f"{where}: {PRESET}: {name} is unknown; there are {', '.join(known)}")
    settings: dict[str, Any] | None = read_yaml(known[name]).get(kind_of(data))
    if settings is None:
        raise UserError(f"{where}: {PRESET}: {name} has nothing for genome kind {kind_of(data)}; write its phases")
    return settings


def kind_of(data: Mapping[str, Any]) -> str:
    """The genome kind that configuration data name."""
    genome = data.get("genome")
    return str(genome.get("kind", DEFAULT)) if isinstance(genome, Mapping) else DEFAULT


def filled(data: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Data with settings that it lacks; mappings are filled up, a list that there is stays as it is."""
    found = dict(data)
    for key, value in settings.items():
        if key not in found:
            found[key] = copy.deepcopy(value)
        elif isinstance(value, Mapping) and isinstance(found[key], Mapping):
            found[key] = filled(found[key], value)
    return found
