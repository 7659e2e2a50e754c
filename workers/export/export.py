"""Export: an edited model as a Hugging Face directory that is known to compute what the search measured."""

from __future__ import annotations

import shutil
import uuid
from dataclasses import replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import numpy as np

from moevolve.evaluators.errors import UserError
from moevolve.workers.config import ModelConfig
from moevolve.workers.export.card import CardFacts, CheckpointForm, ExportCard, ExportReport
from moevolve.workers.export.native import render
from moevolve.workers.export.verify import compare, logits_of, probe_tokens, reload
from moevolve.workers.methods.base import Edit, underlying
from moevolve.workers.methods.contract import Exporter
from moevolve.workers.methods.registry import exporter_of
from moevolve.workers.model.loading import load_tokenizer
from moevolve.workers.model.resident import ResidentModel

MAX_SHARD_SIZE = "5GB"


class ExportError(RuntimeError):
    """An export whose reloaded logits differ from the edited model's. Its directory has been removed."""


def export_model(
    model: ResidentModel | ModelConfig,
    edit: Edit,
    directory: Path,
    card: ExportCard,
    form: CheckpointForm | None = None,
) -> ExportReport:
    """Write an edited model as a checkpoint, reload it, and compare its logits before calling it done.

    The directory appears whole or not at all.

    Args:
        model: a resident model, which is left unedited, or how to load one.
        edit: what to export.
        directory: where to; must not exist yet or be empty.
        card: provenance for the model card.
        form: of the checkpoint; None takes `stock` where that is exact (see `Exporter.form`), else `native`.

    Raises:
        UserError: the target is taken or has no room, the model can't be loaded, the edit doesn't fit it, or the form
            can't express it.
        CandidateError: the edit's values are at fault.
        ExportError: the reloaded export computes something else.
    """
    target = directory.expanduser().absolute()
    _check_target(target)
    resident = ResidentModel.load(model) if isinstance(model, ModelConfig) else model
    exporter = exporter_of(edit)
    part = _part_directory(target)
    try:
        with resident.edited(edit):
            exact = exporter.form(resident, underlying(edit))
            if form == "stock" and exact != "stock":
                raise UserError("--form stock: no model class of transformers computes the same; export it as native")
            report = _export(resident, exporter, form or exact, part, card)
        if target.exists():
            target.rmdir()
        part.rename(target)
    except OSError as error:
        raise UserError(f"export directory {target} can't be written: {error}; choose another place") from error
    finally:
        shutil.rmtree(part, ignore_errors=True)
    size = sum(file.stat().st_size for file in target.rglob("*") if file.is_file())
    return ExportReport(target, report.form, report.experts, report.active, report.parameters, size, report.agreement)


def _export(
    resident: ResidentModel, exporter: Exporter, form: CheckpointForm, part: Path, card: ExportCard
) -> ExportReport:
    """Write, reload and compare in `part`, with the edit applied."""
    tokens = probe_tokens(resident)
    expected = logits_of(resident.model, tokens)
    base = underlying(resident.applied)
    summary = exporter.summary(resident, base, form)
    exported = exporter.build(resident, base, form, part)
    parameters = sum(parameter.numel() for parameter in exported.parameters())
    _check_room(part, sum(parameter.nbytes for parameter in exported.parameters()))
    exported.save_pretrained(part, max_shard_size=MAX_SHARD_SIZE)
    del exported
    load_tokenizer(resident.config).save_pretrained(part)
    arrays = resident.arrays()
    if arrays:
        # Which neuron of which expert a slot's are: [slots, neurons], neuron j of expert e as e * (neurons) + j.
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
    for file in part.iterdir():
        # Weights come out readable by their owner alone; let the umask decide, as for any other file.
        file.chmod(readme.stat().st_mode)
    reloaded = reload(part, form, resident)
    agreement = compare(expected, logits_of(reloaded, tokens), resident.model.dtype)
    if not agreement.holds:
        raise ExportError(
            f"the {form} checkpoint of {card.title} computes other logits than the edited model (difference "
            f"{agreement.accepted_difference:.3g}, allowed {agreement.tolerance:.3g}); nothing was written"
        )
    return ExportReport(part, form, summary.experts, summary.active, parameters, 0, agreement)


def _check_target(target: Path) -> None:
    if target.is_dir():
        if any(target.iterdir()):
            raise UserError(f"export directory {target} is not empty; give a new one, or remove it first")
    elif target.exists():
        raise UserError(f"export directory {target} is a file; give a folder's name")


def _part_directory(target: Path) -> Path:
    """A fresh folder beside the target, so that renaming it is atomic."""
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
