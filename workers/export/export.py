"""Writes an edited model as a Hugging Face directory, and verifies that it computes what the search measured."""

from __future__ import annotations

import copy
import shutil
import uuid
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from moevolve.evaluators.errors import UserError
from moevolve.workers.checkpoints.loading import load_tokenizer
from moevolve.workers.checkpoints.native import render
from moevolve.workers.checkpoints.shards import ShardWriter
from moevolve.workers.checkpoints.state import SavedNames, frame_state, layers_prefix
from moevolve.workers.contract.card import CardFacts, CheckpointForm, ExportCard, ExportError, ExportReport
from moevolve.workers.contract.edits import Edit, underlying
from moevolve.workers.contract.methods import Blueprint, Exporter
from moevolve.workers.contract.settings import ModelConfig
from moevolve.workers.export.verify import VerificationError, record_activations, verify
from moevolve.workers.families.decoder import decoder_layers
from moevolve.workers.methods.registry import exporter_of
from moevolve.workers.model.resident import ResidentModel

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_UNVERIFIED = ".unverified"


def export_model(
    model: ResidentModel | ModelConfig,
    edit: Edit,
    directory: Path,
    card: ExportCard,
    form: CheckpointForm | None = None,
) -> ExportReport:
    """Write an edited model as a checkpoint, and verify its files against the model.

    Tensors are written one by one and compared one decoder layer at a time. So the device holds, in addition to the
    resident model, at most one and a half layers, or the embeddings if they are larger.

    The directory appears complete or not at all. Files that fail the verification are kept next to it, as
    `DIRECTORY.unverified`.

    Args:
        model: Resident model, which is unedited afterwards, or the settings to load one.
        edit: Edit to export.
        directory: Folder of the checkpoint, which must be empty or not exist.
        card: Provenance for the model card.
        form: Form of the checkpoint; None for `stock` if that is exact (see `Exporter.obstacle`), else `native`.

    Raises:
        UserError: The directory is taken, the disk is full, the model can't be loaded, the edit doesn't fit the model,
            or the form can't express the edit.
        CandidateError: The edit has invalid values.
        ExportError: The verification failed.
    """
    target = directory.expanduser().absolute()
    _check_target(target)
    resident = ResidentModel.load(model) if isinstance(model, ModelConfig) else model
    exporter = exporter_of(edit)
    part = _part_directory(target)
    try:
        with resident.edited(edit):
            obstacle = exporter.obstacle(resident, underlying(edit), form)
            if form == "stock" and obstacle is not None:
                raise UserError(f"--form stock: {obstacle}; export it as native")
            exact: CheckpointForm = "stock" if obstacle is None else "native"
            report = _export(resident, exporter, form or exact, part, card)
        if target.exists():
            target.rmdir()
        part.rename(target)
    except VerificationError as error:
        reason = f"the {form or exact} checkpoint of {card.title} failed its verification: {error}"
        raise ExportError(reason, _keep_unverified(part, target)) from error
    except OSError as error:
        raise UserError(f"export directory {target} can't be written: {error}; choose another place") from error
    finally:
        shutil.rmtree(part, ignore_errors=True)
    size = sum(file.stat().st_size for file in target.rglob("*") if file.is_file())
    return replace(report, directory=target, size_bytes=size)


def _export(
    resident: ResidentModel, exporter: Exporter, form: CheckpointForm, part: Path, card: ExportCard
) -> ExportReport:
    """Write and verify the checkpoint in the folder `part`, with the edit applied."""
    base = underlying(resident.applied)
    summary = exporter.summary(resident, base, form)
    blueprint = exporter.build(resident, base, form, part)
    parameters = sum(parameter.numel() for parameter in blueprint.model.parameters())
    _write_settings(resident, blueprint.model, form, part)
    checksums = _write_weights(resident, blueprint, part)
    arrays = resident.arrays()
    if arrays:
        # The neurons of every kept expert, [kept experts, neurons]: neuron j of expert e is e * width + j.
        np.savez_compressed(part / "neurons.npz", **arrays)  # type: ignore[arg-type]  # its stub's `allow_pickle`
    facts = CardFacts(
        summary=replace(summary, rows=(*summary.rows, *resident.report())),
        form=form,
        parameters=parameters,
        phenotype_hash=resident.applied.phenotype_hash,
        version=version("moevolve"),
        created=datetime.now(UTC).strftime("%Y-%m-%d"),
    )
    readme = part / "README.md"
    readme.write_text(render("export/model_card.md.jinja", card=card, facts=facts), encoding="utf-8")
    try:
        agreement = verify(part, form, resident, record_activations(resident), checksums)
    except torch.OutOfMemoryError as error:
        raise VerificationError(
            f"{resident.device} has no room for a layer of it beside the model; export with --device cpu"
        ) from error
    return ExportReport(part, form, summary.experts, summary.active, parameters, 0, agreement)


def _write_settings(resident: ResidentModel, model: PreTrainedModel, form: CheckpointForm, part: Path) -> None:
    """Write the config, the generation config and the tokenizer."""
    config: Any = model.config
    config.architectures = [type(model).__name__]
    # Weights are written dequantised. Code that came with a stock model's checkpoint isn't exported, and it isn't what
    # the search ran.
    for setting in ("quantization_config", "auto_map") if form == "stock" else ("quantization_config",):
        if hasattr(config, setting):
            delattr(config, setting)
    config.save_pretrained(part)
    if resident.model.generation_config is not None:
        copy.deepcopy(resident.model.generation_config).save_pretrained(part)
    tokenizer = load_tokenizer(resident.config)
    if type(tokenizer).__module__.startswith("transformers."):
        tokenizer.init_kwargs.pop("auto_map", None)
    tokenizer.save_pretrained(part)


def _write_weights(resident: ResidentModel, blueprint: Blueprint, part: Path) -> dict[str, int]:
    """Write all tensors; returns their checksums by name."""
    names = SavedNames(blueprint.model)
    planned = {name: tensor.nbytes for saved in names.tensors.values() for name, tensor in saved.items()}
    _check_room(part, sum(planned.values()))
    with ShardWriter(part, planned) as writer:
        for name, tensor in _tensors(resident, blueprint):
            wanted = blueprint.model.get_parameter_or_buffer(name).shape
            if tensor.shape != wanted:
                raise ValueError(f"tensor {name} is of shape {list(tensor.shape)}, the model has {list(wanted)}")
            for saved, values in names.saved(name, tensor).items():
                writer.write(saved, values)
        writer.finish()
    return writer.checksums


def _tensors(resident: ResidentModel, blueprint: Blueprint) -> Iterator[tuple[str, Tensor]]:
    """Yield all tensors of the exported model with their names, created on demand."""
    yield from frame_state(resident.model).items()
    prefix = layers_prefix(blueprint.model)
    for index in range(len(decoder_layers(blueprint.model))):
        for name, tensor in blueprint.layer(index):
            yield f"{prefix}{index}.{name}", tensor


def _keep_unverified(part: Path, target: Path) -> Path:
    """Rename the folder to an unused name that marks it as unverified."""
    kept, count = target.with_name(target.name + _UNVERIFIED), 1
    while kept.exists():
        count += 1
        kept = target.with_name(f"{target.name}{_UNVERIFIED}-{count}")
    part.rename(kept)
    return kept


def _check_target(target: Path) -> None:
    if target.is_dir():
        if any(target.iterdir()):
            raise UserError(f"export directory {target} is not empty; give a new one, or remove it first")
    elif target.exists():
        raise UserError(f"export directory {target} is a file; give a folder's name")


def _part_directory(target: Path) -> Path:
    """Create a new folder next to the target, so that renaming it to the target is atomic."""
    part = target.with_name(f".{target.name}.part-{uuid.uuid4().hex[:8]}")
    try:
        part.mkdir(parents=True)
    except OSError as error:
        raise UserError(f"export directory {target} can't be made: {error.strerror}; choose another place") from error
    return part


def _check_room(part: Path, needed: int) -> None:
    free = shutil.disk_usage(part).free
    if free < needed * 1.02 + (1 << 20):
        raise UserError(
            f"no room for the export: {needed / 1e9:.1f} GB needed, {free / 1e9:.1f} GB free at {part.parent}; "
            "free some, or choose another place"
        )
