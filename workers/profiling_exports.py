"""Throw-away exports, for profiling what a user would load."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from pathlib import Path

import torch

from moevolve.evaluators.errors import CandidateError, UserError
from moevolve.workers.config import ModelConfig
from moevolve.workers.edits.base import Edit
from moevolve.workers.export import export_model
from moevolve.workers.export_card import ExportCard
from moevolve.workers.profiling_messages import ProfiledModel
from moevolve.workers.resident import ResidentModel


def export_models(model: ModelConfig, edits: Sequence[tuple[str, Edit]], folder: Path) -> tuple[ProfiledModel, ...]:
    """Write verified checkpoints of edited models; the unedited one is loaded once, and let go at the end.

    Args:
        model: the unedited model.
        edits: each with what the user calls it.
        folder: where to; checkpoints take numbers for names.

    Raises:
        UserError: the model can't be loaded, an edit has no checkpoint, or there is no room.
        ExportError: a checkpoint computes something else than the edited model.
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
