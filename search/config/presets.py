"""Presets: settings that a run file includes by name and that its own settings override."""

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
"""Key of a run file that names a preset."""
BEST = "best"
"""Preset of run files that name none and have no phases."""


def presets() -> dict[str, Path]:
    """The packaged presets by name."""
    folder = Path(str(files("moevolve.configs"))) / "presets"
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def with_preset(data: dict[str, Any], where: str) -> dict[str, Any]:
    """Fill plain configuration data with the settings of the preset it names.

    Args:
        data: Content of a run file; it isn't modified.
        where: Start of the error message.

    Raises:
        UserError: There is no such preset, or it has nothing for this kind of genome.
    """
    own = {key: value for key, value in data.items() if key != PRESET}
    if PRESET in data:
        return filled(own, preset(data[PRESET], own, where))
    # A genome kind may lack this preset; then validation reports the missing phases with all other faults.
    return own if "phases" in own else filled(own, read_yaml(presets()[BEST]).get(kind_of(own), {}))


def preset(name: Any, data: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The settings of a preset for the kind of genome of some configuration data.

    Raises:
        UserError: The same errors as `with_preset`.
    """
    known = presets()
    if name not in known:
        raise UserError(f"{where}: {PRESET}: {name} is unknown; there are {', '.join(known)}")
    settings: dict[str, Any] | None = read_yaml(known[name]).get(kind_of(data))
    if settings is None:
        raise UserError(f"{where}: {PRESET}: {name} has nothing for genome kind {kind_of(data)}; write its phases")
    return settings


def kind_of(data: Mapping[str, Any]) -> str:
    """The genome kind of plain configuration data, or the default kind."""
    genome = data.get("genome")
    return str(genome.get("kind", DEFAULT)) if isinstance(genome, Mapping) else DEFAULT


def filled(data: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of `data` with the settings it lacks; mappings are merged, and existing lists stay unchanged."""
    found = dict(data)
    for key, value in settings.items():
        if key not in found:
            found[key] = copy.deepcopy(value)
        elif isinstance(value, Mapping) and isinstance(found[key], Mapping):
            found[key] = filled(found[key], value)
    return found
