"""Finds a checkpoint's files on this machine, without importing torch: a driver looks for them before it starts Ray."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

from moevolve.evaluators.errors import UserError, opening
from moevolve.workers.contract.settings import ModelConfig

_PART = re.compile(r"(?P<name>.+)-(?P<part>\d{5})-of-(?P<parts>\d{5})\.gguf")


def read_json(file: Path) -> Any:
    """Return the content of a JSON file. Raises a `UserError` if it isn't valid JSON."""
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{file}: not valid JSON ({error}); mend this file or fetch it again") from error


def gguf_parts(file: Path) -> tuple[Path, ...]:
    """Return all files of a GGUF model in order, given one of them; raise a `UserError` if one is missing."""
    match = _PART.fullmatch(file.name)
    names = [file.name]
    if match is not None:
        parts = range(1, int(match["parts"]) + 1)
        names = [f"{match['name']}-{part:05}-of-{match['parts']}.gguf" for part in parts]
    for name in names:
        if not (file.parent / name).is_file():
            hint = "; a split model needs all its parts in one folder" if match else ""
            raise UserError(f"{file.parent / name}: no such file{hint}")
    return tuple(file.parent / name for name in names)


def gguf_file(config: ModelConfig) -> Path | None:
    """Return the checkpoint's GGUF file, the first part of a split one; None if `path` isn't such a file."""
    path = Path(config.path).expanduser()
    return gguf_parts(path)[0] if path.suffix == ".gguf" else None


def local_directory(config: ModelConfig) -> Path | None:
    """Return the checkpoint's directory, for a GGUF file the one that it is in, or None if `path` is a hub id.

    Raises:
        UserError: `path` looks like a path, but isn't the directory of a checkpoint.
    """
    file = gguf_file(config)
    if file is not None:
        return file.parent
    path = Path(config.path).expanduser()
    if path.is_dir():
        files = sorted(path.glob("*.gguf"))
        if files and not any(path.glob("*.safetensors")):
            raise UserError(f"model {config.path}: of a folder of GGUF files give one, for example {files[0]}")
        if not (path / "config.json").is_file():
            raise UserError(f"model {config.path}: the directory has no config.json; give the folder of a checkpoint")
        return path
    hub_like = (
        config.path.count("/") <= 1 and not config.path.startswith((".", "~", os.sep)) and "\\" not in config.path
    )
    file_in_path = os.path.lexists(path.parent) and not path.parent.is_dir()
    if path.exists() or not hub_like or file_in_path:
        raise UserError(f"model {config.path}: no such directory; give a checkpoint's folder or a hub id (owner/name)")
    return None


def config_file(config: ModelConfig) -> Path:
    """Return the config.json of a checkpoint, of a hub id from the hub or its cache.

    Raises:
        UserError: There is none.
    """
    folder = local_directory(config)
    if folder is not None:
        return folder / "config.json"
    from transformers.utils.hub import cached_file

    with opening(f"model {config.path}: not found on the hub or in its cache"):
        return Path(str(cached_file(config.path, "config.json", revision=config.revision or "main")))


def weight_bytes(folder: Path) -> int:
    """Return the size of the weight files in a checkpoint's folder."""
    return sum(file.stat().st_size for suffix in ("safetensors", "gguf") for file in folder.glob(f"*.{suffix}"))
