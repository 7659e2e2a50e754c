"""Writes an edited model as a Hugging Face directory, and verifies that it computes what the search measured."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moevolve.evaluators.errors import UserError
from moevolve.workers.checkpoints.loading import checkpoint_folder, load_config
from moevolve.workers.checkpoints.shards import ShardWriter
from moevolve.workers.checkpoints.state import SavedNames, frame_state, layers_prefix
from moevolve.workers.contract.card import CardFacts, CheckpointForm, ExportCard, ExportReport
from moevolve.workers.contract.edits import Edit, underlying
from moevolve.workers.contract.methods import Blueprint, Exporter
from moevolve.workers.contract.settings import ModelConfig
from moevolve.workers.export.config_files import copy_unpacked, write_config
from moevolve.workers.export.folder import VerificationError, check_room, finished, new_checkpoint, write_card
from moevolve.workers.export.verify import Recorder, verify
from moevolve.workers.families.decoder import decoder_layers
from moevolve.workers.families.registry import only_inside
from moevolve.workers.methods.registry import exporter_of
from moevolve.workers.model.resident import ResidentModel

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def export_model(
    model: ResidentModel | ModelConfig,
    edit: Edit,
    directory: Path,
    card: ExportCard,
    form: CheckpointForm | None = None,
) -> ExportReport:
    """Write an edited model as a checkpoint, and verify its files against the model.

    Tensors are written one by one and compared one decoder layer at a time. So the device holds, in addition to the
    resident model, at most one and a half layers, or the embeddings and the output head if they are larger.

    Args:
        model: Resident model, which is unedited afterwards, or the settings to load one.
        edit: Edit to export.
        directory: Folder of the checkpoint; see `new_checkpoint`.
        card: Provenance for the model card.
        form: `stock` or `native`; None for `stock` if that is exact (see `Exporter.obstacle`), else `native`. For the
            source form see `moevolve.workers.export.source`.

    Raises:
        UserError: The directory is taken, the disk is full, the model can't be loaded, the edit doesn't fit the model,
            or the form can't express the edit.
        CandidateError: The edit has invalid values.
        ExportError: The verification failed.
    """
    exporter = exporter_of(edit)
    with new_checkpoint(directory, card.title) as part:
        alone = (load_config(model) if isinstance(model, ModelConfig) else model.model.config).model_type
        if only_inside(alone):
            raise UserError(f"transformers has no class for {alone} models alone; export the individual as source")
        resident = ResidentModel.load(model) if isinstance(model, ModelConfig) else model
        with resident.layers_with(edit) as layers:
            obstacle = exporter.obstacle(resident, underlying(edit))
            if form == "stock" and obstacle is not None:
                raise UserError(f"--form stock: {obstacle}; export it as native")
            exact: CheckpointForm = "stock" if obstacle is None else "native"
            report = _export(resident, edit, layers, exporter, form or exact, part, card)
    return finished(report, directory)


def write_stock(resident: ResidentModel, directory: Path) -> None:
    """Write the resident model with its current edit as a stock checkpoint, without a card and without verification.

    Raises:
        UserError: No model class of `transformers` computes the edited model, or the disk is full.
    """
    base = underlying(resident.applied)
    exporter = exporter_of(base)
    obstacle = exporter.obstacle(resident, base)
    if obstacle is not None:
        raise UserError(f"this model has no stock checkpoint: {obstacle}")
    layers = iter(range(len(decoder_layers(resident.model))))
    _write_files(resident, resident.applied, layers, exporter, "stock", directory)


def _export(
    resident: ResidentModel,
    edit: Edit,
    layers: Iterator[int],
    exporter: Exporter,
    form: CheckpointForm,
    part: Path,
    card: ExportCard,
) -> ExportReport:
    """Write and verify the checkpoint in the folder `part`; the edit is on every layer when it comes."""
    summary = exporter.summary(resident, underlying(edit), form)
    recorder = Recorder(resident)
    model, checksums = _write_files(resident, edit, _recorded(layers, recorder), exporter, form, part)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    shown = replace(summary, rows=(*summary.rows, *resident.report(edit)))
    facts = CardFacts(shown, form, parameters, edit.phenotype_hash)
    write_card(part, card, facts, checkpoint_folder(resident.config))
    try:
        agreement = verify(part, form, resident, recorder.recorded(), checksums)
    except torch.OutOfMemoryError as error:
        raise VerificationError(
            f"{resident.device} has no room for a layer of it beside the model; export with --device cpu"
        ) from error
    return ExportReport(part, form, summary.experts, summary.active, parameters, 0, agreement)


def _recorded(layers: Iterator[int], recorder: Recorder) -> Iterator[int]:
    """Record the activations of every layer before it is written."""
    for index in layers:
        recorder.layer(index)
        yield index


def _write_files(
    resident: ResidentModel, edit: Edit, layers: Iterator[int], exporter: Exporter, form: CheckpointForm, part: Path
) -> tuple[PreTrainedModel, dict[str, int]]:
    """Write all that `transformers` reads; returns the model on the meta device, and tensors' checksums by name."""
    blueprint = exporter.build(resident, underlying(edit), form, part)
    config = blueprint.model.config
    config.architectures = [type(blueprint.model).__name__]
    # Code that came with a stock model's checkpoint isn't exported, and it isn't what the search ran.
    if form == "stock" and hasattr(config, "auto_map"):
        del config.auto_map
    write_config(resident.config, config, part)
    copy_unpacked(resident.config, resident.tokenizer, part)
    return blueprint.model, _write_weights(resident, layers, blueprint, part)


def _write_weights(resident: ResidentModel, layers: Iterator[int], blueprint: Blueprint, part: Path) -> dict[str, int]:
    """Write all tensors; returns their checksums by name."""
    names = SavedNames(blueprint.model)
    planned = {name: tensor.nbytes for saved in names.tensors.values() for name, tensor in saved.items()}
    check_room(part, sum(planned.values()))
    writer = ShardWriter(part, planned)
    for name, tensor in _tensors(resident, layers, blueprint):
        for saved, values in names.saved(name, tensor).items():
            writer.write(saved, values)
    writer.finish()
    return writer.checksums


def _tensors(resident: ResidentModel, layers: Iterator[int], blueprint: Blueprint) -> Iterator[tuple[str, Tensor]]:
    """Yield all tensors of the exported model with their names, created on demand."""
    yield from frame_state(resident.model).items()
    prefix = layers_prefix(blueprint.model)
    for index in layers:
        for name, tensor in blueprint.layer(index):
            yield f"{prefix}{index}.{name}", tensor
