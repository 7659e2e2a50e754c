"""Writes the biases that turn a checkpoint into a pruned model without changing anything else.

A router with a bias b chooses by `s + b` (DeepSeek-V3, arXiv 2412.19437, Sec. 2.1.2) or by `W x + b` (GPT-OSS,
Kolibri-1). With b = `MASK` an expert is chosen only if too few others can be. Weights are computed from the chosen
experts alone, so a mask changes nothing else: the sigmoids don't depend on each other, and GPT-OSS takes the softmax of
the chosen.
"""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import TYPE_CHECKING

from moevolve.evaluators.errors import UserError
from moevolve.kernels.routing_rule import RoutingRule
from moevolve.workers.checkpoints.files import gguf_file
from moevolve.workers.checkpoints.headers import file_tensors, stored_tensors
from moevolve.workers.checkpoints.pruning import MASK
from moevolve.workers.contract.card import CardFacts, ExportCard, ExportReport
from moevolve.workers.contract.methods import ExpertSelection
from moevolve.workers.export.config_files import write_json
from moevolve.workers.export.folder import finished, new_checkpoint, write_card
from moevolve.workers.export.source import (
    SourceCheckpoint,
    changes_weights,
    check_masked,
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
        kept = source.pruning(stored_tensors(source.folder), selection).kept()
        tensors = [tensor for tensor in kept if tensor.masked]
        check_masked(tensors, selection)
        tensors.sort(key=lambda tensor: -tensor.source.alignment)
        data = {tensor.name: b"".join(tensor.chunks()) for tensor in tensors}
        (part / MASK_TENSORS).write_bytes(header_of({"format": "pt"}, tensors) + b"".join(data.values()))
        written = {tensor.name: tensor for tensor in file_tensors(part / MASK_TENSORS)}
        compare_bytes(written, tensors, {name: zlib.crc32(each) for name, each in data.items()})
        by_layer = zip(facts.moe_layers, selection.masked, strict=True)
        settings = {
            "base_model": card.base_model,
            "fingerprint": card.base_fingerprint,
            "num_experts_per_tok": selection.active,
            "bias": MASK,
            "tensors": sorted(data),
            "masked_experts": {str(layer): experts for layer, experts in by_layer if experts},
        }
        write_json(part / MASK_SETTINGS, settings)
        note = f"It has the {len(tensors)} biases that differ from the base model's, and nothing else."
        summary = exporter.selection_summary(edit, facts, note)
        write_card(part, card, CardFacts(summary, "mask", facts.parameters, edit.phenotype_hash), source.folder)
    report = ExportReport(
        part, "mask", summary.experts, summary.active, facts.parameters, 0, agreement=None, copied=len(tensors)
    )
    return finished(report, directory)


def masked_instead(selection: ExpertSelection, experts: int, rule: RoutingRule) -> ExpertSelection:
    """Return a selection that keeps all experts, n per layer, and masks those that another one leaves out.

    Raises:
        UserError: No mask computes the same, because router rows belong to other experts, or because the groups that
            tokens choose from are others.
    """
    if selection.routers != selection.experts:
        raise UserError("--form mask: it gives experts the router rows of others, which no mask does; use another form")
    size, kept = experts // rule.groups.count, selection.retained // rule.groups.count
    for layer in selection.experts:
        groups = [{each // size for each in layer[start : start + kept]} for start in range(0, len(layer), kept)]
        if rule.groups.count > 1 and (any(len(each) > 1 for each in groups) or len(set().union(*groups)) < len(groups)):
            raise UserError(
                "--form mask: its routing groups mix experts of several of the model's, so tokens would choose from "
                "other groups; use another form"
            )
    every = (tuple(range(experts)),) * len(selection.experts)
    masked = tuple(tuple(sorted(set(range(experts)) - set(layer))) for layer in selection.experts)
    return ExpertSelection(every, every, selection.active, masked)
