"""Models whose configs come with the package, by name."""

from __future__ import annotations

import difflib
from importlib.resources import files
from pathlib import Path

from moevolve.evaluators.errors import UserError


def shipped_models() -> dict[str, str]:
    """The folders of the configs that come with the package, by name."""
    folder = Path(str(files("moevolve.configs"))) / "models"
    return {path.parent.name: str(path.parent) for path in sorted(folder.glob("*/config.json"))}


def find_model(name: str, option: str = "--model") -> str:
    """Resolve the name of a shipped config to its folder; a path or a hub id (with `/`) is returned unchanged.

    Args:
        name: A shipped config's name, a folder or a hub id.
        option: Command-line option that the error message names.

    Raises:
        UserError: A plain name is neither a folder nor a shipped config.
    """
    shipped = shipped_models()
    if Path(name).is_dir() or "/" in name:
        return name
    if name in shipped:
        return shipped[name]
    near = difflib.get_close_matches(name, shipped, n=3)
    hint = f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(shipped)}"
    raise UserError(f"{option} {name}: no such folder, and no config of this name comes with moevolve; {hint}")
