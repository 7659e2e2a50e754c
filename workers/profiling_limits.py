"""What can be said against profiling a checkpoint before any weights are loaded."""

from __future__ import annotations

import json
from pathlib import Path

from moevolve.evaluators.errors import UserError
from moevolve.workers.config import ModelConfig
from moevolve.workers.layout import family_of
from moevolve.workers.loading import load_config
from moevolve.workers.native import NATIVE_PREFIX


def check_folder(name: str, trust_remote_code: bool) -> Path:
    """The folder of a checkpoint that may be loaded.

    Raises:
        UserError: it isn't one, has no safetensors, or brings modelling code that isn't trusted.
    """
    folder = Path(name).expanduser().absolute()
    if not folder.is_dir():
        raise UserError(f"{name}: no such folder; give SEARCH:INDEX, full, or the folder of a checkpoint")
    try:
        settings = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{name}: no readable config.json in it; give the folder of a checkpoint") from error
    if not any(folder.glob("*.safetensors")):
        raise UserError(f"{name}: no *.safetensors file in it; convert the checkpoint first")
    if "auto_map" in settings and not trust_remote_code:
        raise UserError(f"{name}: it brings modelling code; read it, then allow it with --trust-remote-code")
    return folder


def position_limit(config: ModelConfig) -> int:
    """How many positions a model has.

    Raises:
        UserError: its config can't be read, or its family isn't supported.
    """
    settings = load_config(config)
    native = settings.model_type.startswith(NATIVE_PREFIX)
    if not native:
        family_of(settings, config.path)
    return int(settings.max_position_embeddings)
