"""Models whose configs come with the package, by name."""

from __future__ import annotations

import difflib
from importlib.resources import files
from pathlib import Path

from moevolve.evaluators.errors import UserError


def shipped_models() -> dict[str, str]:
    """Name -> folder of the configs that come with the package."""
    folder = Path(str(files("moevolve.configs"))) / "models"
    return {path.parent.name: str(path.parent) for path in sorted(folder.glob("*/config.json"))}


def find_model(name: str, option: str = "--model") -> str:
    """The folder of a shipped config by its name; anything else as it is.

    Args:
        name: what a user typed.
        option: where.

    Raises:
        UserError: a plain name that is no folder and none of the shipped ones.
    """
    shipped = shipped_models()
    if Path(name).is_dir() or "/" in name:
        return name
    if name in shipped:
        return shipped[name]
    near = difflib.get_close_matches(name, shipped, n=3)
    hint = f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(shipped)}"
    raise UserError(f"{option} {name}: no such folder, and no config of this name comes with moevolve; {hint}")
