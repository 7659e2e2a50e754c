"""Export: an edited model as a Hugging Face directory that is known to compute what the search measured."""

from __future__ import annotations

import shutil
import uuid
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import torch

from moevolve.evaluators.errors import UserError
from moevolve.workers.config import ModelConfig
from moevolve.workers.edits.base import Edit
from moevolve.workers.edits.eep import EepEdit
from moevolve.workers.export_card import CardFacts, ExportCard, ExportReport
from moevolve.workers.export_state import CheckpointForm, build_model, checkpoint_form, exported_shape
from moevolve.workers.export_verify import compare, logits_of, probe_tokens, reload
from moevolve.workers.layout import family_of
from moevolve.workers.loading import load_tokenizer
from moevolve.workers.native import write_native_code
from moevolve.workers.resident import ResidentModel
from moevolve.workers.templates import render

MAX_SHARD_SIZE = "5GB"


class ExportError(RuntimeError):
    """An export whose reloaded logits differ from the edited model's. Its directory has been removed."""


def export_model(model: ResidentModel | ModelConfig, edit: Edit, directory: Path, card: ExportCard) -> ExportReport:
    """Write an edited model as a checkpoint, reload it, and compare its logits before calling it done.

    The `stock` form is chosen where it is exact (see `checkpoint_form`), else the `native` one. The directory appears
    whole or not at all.

    Args:
        model: a resident model, which is left unedited, or how to load one.
        edit: what to export.
        directory: where to; must not exist yet or be empty.
        card: provenance for the model card.

    Raises:
        UserError: the target is taken or has no room, the model can't be loaded, or the edit doesn't fit it.
        CandidateError: the edit's values are at fault.
        ExportError: the reloaded export computes something else.
    """
    target = directory.expanduser().absolute()
    _check_target(target)
    resident = ResidentModel.load(model) if isinstance(model, ModelConfig) else model
    form = checkpoint_form(edit, resident.layers[0].renormalise)
    part = _part_directory(target)
    try:
        with resident.edited(edit):
            report = _export(resident, form, part, card)
        if target.exists():
            target.rmdir()
        part.rename(target)
    except OSError as error:
        raise UserError(f"export directory {target} can't be written: {error}; choose another place") from error
    finally:
        shutil.rmtree(part, ignore_errors=True)
    size = sum(file.stat().st_size for file in target.rglob("*") if file.is_file())
    return ExportReport(target, form, report.experts, report.active, report.parameters, size, report.agreement)


def _export(resident: ResidentModel, form: CheckpointForm, part: Path, card: ExportCard) -> ExportReport:
    """Write, reload and compare in `part`, with the edit applied."""
    tokens = probe_tokens(resident)
    expected = logits_of(resident.model, tokens)
    retained, active = exported_shape(resident)
    if form == "native":
        write_native_code(part, resident.model, resident.layers[0], retained, version("moevolve"))
    exported = build_model(resident, form, part)
    parameters = sum(parameter.numel() for parameter in exported.parameters())
    _check_room(part, sum(parameter.nbytes for parameter in exported.parameters()))
    exported.save_pretrained(part, max_shard_size=MAX_SHARD_SIZE)
    del exported
    load_tokenizer(resident.config).save_pretrained(part)
    facts = _card_facts(resident, form, parameters)
    readme = part / "README.md"
    readme.write_text(render("model_card.md.jinja", card=card, facts=facts), encoding="utf-8")
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
    return ExportReport(part, form, retained, active, parameters, 0, agreement)


def _card_facts(resident: ResidentModel, form: CheckpointForm, parameters: int) -> CardFacts:
    edit = resident.applied
    retained, active = exported_shape(resident)
    before = sum(p.numel() for p in resident.model.parameters())
    # The resident's expert tensors may be buffers of another size than the original's.
    for layer in resident.layers:
        for tensor in (layer.experts.gate_up_proj, layer.experts.down_proj):
            assert isinstance(tensor, torch.Tensor)
            before += (layer.count - tensor.shape[0]) * tensor[0].numel()
    return CardFacts(
        title=family_of(resident.model.config, resident.config.path).title,
        form=form,
        experts_before=resident.layers[0].count,
        experts=retained,
        active_before=int(resident.model.config.num_experts_per_tok),
        active=active,
        parameters_before=before,
        parameters=parameters,
        router_space=edit.router_space if isinstance(edit, EepEdit) else "-",
        phenotype_hash=edit.phenotype_hash,
        version=version("moevolve"),
        created=datetime.now(UTC).strftime("%Y-%m-%d"),
    )


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
