"""Prepares checkpoints for profiling: checks them before weights are loaded, and exports individuals temporarily."""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from moevolve.evaluators.errors import CandidateError, UserError
from moevolve.workers.checkpoints.loading import load_config
from moevolve.workers.checkpoints.native import NATIVE_PREFIX
from moevolve.workers.contract.card import ExportCard
from moevolve.workers.contract.edits import Edit
from moevolve.workers.contract.settings import ModelConfig
from moevolve.workers.engine.tokenizing import context_of
from moevolve.workers.export.export import export_model
from moevolve.workers.families.registry import FAMILIES, family_of
from moevolve.workers.model.resident import ResidentModel
from moevolve.workers.profiling.report import ProfiledModel


def check_folder(name: str, trust_remote_code: bool) -> Path:
    """Check that a folder holds safetensors, and no modelling code that isn't trusted; returns its path."""
    folder = Path(name).expanduser().absolute()
    if not folder.is_dir():
        raise UserError(f"{name}: no such folder; give SEARCH:INDEX, full, or the folder of a checkpoint")
    try:
        settings = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{name}: no readable config.json in it; give the folder of a checkpoint") from error
    if not any(folder.glob("*.safetensors")):
        raise UserError(f"{name}: no *.safetensors file in it; convert the checkpoint first")
    # Published checkpoints of a supported family may still name their own code, from before `transformers` had it.
    if "auto_map" in settings and settings.get("model_type") not in FAMILIES and not trust_remote_code:
        raise UserError(f"{name}: it brings modelling code; read it, then allow it with --trust-remote-code")
    return folder


def position_limit(config: ModelConfig) -> int:
    """Return the number of positions that a model was made for; its family must be supported."""
    settings = load_config(config)
    if not settings.model_type.startswith(NATIVE_PREFIX):
        family_of(settings, config.path)
    return context_of(settings) or sys.maxsize


def export_models(model: ModelConfig, edits: Sequence[tuple[str, Edit]], folder: Path) -> tuple[ProfiledModel, ...]:
    """Export verified checkpoints of edited models, given as pairs of a label and an edit, into numbered folders.

    The unedited model is loaded once.

    Raises:
        UserError: The model can't be loaded, an edit can't be exported, or the disk is full.
        ExportError: A checkpoint computes something else than the edited model.
    """
    resident = ResidentModel.load(model)
    written = []
    try:
        for number, (label, edit) in enumerate(edits):
            try:
                report = export_model(resident, edit, folder / str(number), ExportCard(label, model.path, ""))
            except CandidateError as error:
                raise UserError(f"{label} has no checkpoint to profile: {error}") from error
            path = str(report.directory)
            written.append(ProfiledModel(label, path, None, model.device_map, report.form == "native"))
    finally:
        del resident
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return tuple(written)
