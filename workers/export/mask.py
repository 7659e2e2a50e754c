"""Writes the biases that turn a checkpoint into a pruned model without changing anything else."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import TYPE_CHECKING

from moevolve.evaluators.errors import UserError
from moevolve.workers.checkpoints.files import gguf_file
from moevolve.workers.checkpoints.headers import file_tensors, stored_tensors
from moevolve.workers.checkpoints.pruning import MASK
from moevolve.workers.contract.card import CardFacts, ExportCard, ExportReport
from moevolve.workers.export.folder import finished, new_checkpoint, write_card
from moevolve.workers.export.masking import check_masked, masked_instead
from moevolve.workers.export.source import (
    SourceCheckpoint,
    changes_weights,
    compare_bytes,
    header_of,
    pruning_exporter,
)

if TYPE_CHECKING:
    from moevolve.workers.contract.edits import Edit
    from moevolve.workers.contract.settings import ModelConfig

MASK_TENSORS = "mask.safetensors"
MASK_SETTINGS = "mask.json"


def export_mask(model: ModelConfig, edit: Edit, directory: Path, card: ExportCard) -> ExportReport:
    """Write the biases of an edited model's routers, with which the source checkpoint never chooses a pruned expert.

    `mask.safetensors` has the changed tensors with the names, shapes and dtypes of the checkpoint. `mask.json` has the
    checkpoint's fingerprint, the number of active experts k, and per decoder layer the tensor and the masked experts.
    For the folder see `new_checkpoint`.

    Raises:
        UserError: No mask computes the same as the edit, the family has no bias, the checkpoint is a GGUF file or can't
            be read; or the directory is taken, or the disk is full.
        ExportError: A written tensor differs from what was to be written.
    """
    with new_checkpoint(directory, card.title) as part:
        if gguf_file(model) is not None:
            raise UserError("--form mask: a GGUF file's biases can't be replaced by others; use --form source")
        changed = changes_weights(edit)
        if changed is not None:
            raise UserError(f"--form mask: {changed}, and a mask can only leave experts out; use another form")
        exporter, source = pruning_exporter(edit), SourceCheckpoint(model)
        facts = source.facts
        selection = masked_instead(exporter.selection(edit, facts), facts.experts, facts.rule)
        tensors = [
            tensor for tensor in source.pruning(stored_tensors(source.folder), selection).kept() if tensor.masked
        ]
        check_masked(tensors, selection)
        tensors.sort(key=lambda tensor: -tensor.source.alignment)
        data = {tensor.name: b"".join(tensor.chunks()) for tensor in tensors}
        (part / MASK_TENSORS).write_bytes(header_of({"format": "pt"}, tensors) + b"".join(data.values()))
        written = {tensor.name: tensor for tensor in file_tensors(part / MASK_TENSORS)}
        compare_bytes(written, tensors, {name: zlib.crc32(each) for name, each in data.items()})
        masked = {
            str(layer): experts for layer, experts in zip(facts.moe_layers, selection.masked, strict=True) if experts
        }
        settings = {
            "base_model": card.base_model,
            "fingerprint": card.base_fingerprint,
            "num_experts_per_tok": selection.active,
            "bias": MASK,
            "tensors": sorted(data),
            "masked_experts": masked,
        }
        (part / MASK_SETTINGS).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
        note = f"It has the {len(tensors)} biases that differ from the base model's, and nothing else."
        summary = exporter.selection_summary(edit, facts, note)
        write_card(part, card, CardFacts(summary, "mask", facts.parameters, edit.phenotype_hash))
    report = ExportReport(
        part, "mask", summary.experts, summary.active, facts.parameters, 0, agreement=None, copied=len(tensors)
    )
    return finished(report, directory)
