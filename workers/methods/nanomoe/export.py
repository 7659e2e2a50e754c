"""NanoMoE edits as checkpoints: always native, no family has block-mixed linear layers."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from moevolve.workers.export.base import CheckpointForm, ExportSummary, filled
from moevolve.workers.export.native import MODULE, import_native, native_config, native_names, render
from moevolve.workers.export.state import loaded_parameters, originals_of, unwrapped_state
from moevolve.workers.families.registry import family_of
from moevolve.workers.methods.base import Edit
from moevolve.workers.methods.nanomoe.apply import BlockMixedLinear
from moevolve.workers.methods.nanomoe.edit import NanoMoeEdit
from moevolve.workers.model.resident import ResidentModel

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


class NanoMoeExporter:
    """See `Exporter`."""

    def form(self, resident: ResidentModel, edit: Edit) -> CheckpointForm:
        return "native"

    def summary(self, resident: ResidentModel, form: CheckpointForm) -> ExportSummary:
        edit = _edit(resident)
        title = family_of(resident.model.config, resident.config.path).title
        what = "low-rank" if edit.form.variant == "low_rank" else "block-mixed"
        return ExportSummary(
            experts=edit.form.blocks,
            active=edit.form.blocks,
            parameters_before=_parameters_before(resident, edit),
            lead=f"{title} with {len(edit.layers)} of its linear layers made {what} ones of rank {edit.form.rank}",
            method="NanoMoE (a mixture of experts within single layers)",
            tag="low-rank",
            form_note="The modelling code beside this card holds the layers' form; it needs\n`transformers` only.",
            rows=(
                ("variant", edit.form.variant),
                ("blocks K", str(edit.form.blocks)),
                ("rank r", str(edit.form.rank)),
                ("layers", ", ".join(dict.fromkeys(name.split(".", 2)[-1] for name in edit.layers))),
            ),
        )

    def build(self, resident: ResidentModel, form: CheckpointForm, directory: Path) -> PreTrainedModel:
        source, edit = resident.model, _edit(resident)
        _write_code(directory, resident, edit)
        model_class = import_native(directory)
        with torch.device("meta"):
            model = model_class(_config(source, model_class, edit))
        state = unwrapped_state(source)
        for ordinal, layer in enumerate(resident.layers):
            prefix = f"model.layers.{layer.index}.mlp.experts."
            state |= {prefix + name: tensor for name, tensor in originals_of(resident, ordinal).items()}
        return filled(model, state, source)


def _edit(resident: ResidentModel) -> NanoMoeEdit:
    edit = resident.applied
    assert isinstance(edit, NanoMoeEdit)
    return edit


def _parameters_before(resident: ResidentModel, edit: NanoMoeEdit) -> int:
    before = loaded_parameters(resident)
    for module in resident.model.modules():
        if isinstance(module, BlockMixedLinear):
            outputs, inputs = module.u.shape[:2].numel(), len(module.v) * module.v.shape[2]
            before += outputs * inputs - edit.form.parameters(outputs, inputs)
    return before


def _write_code(directory: Path, resident: ResidentModel, edit: NanoMoeEdit) -> None:
    config, model = resident.model.config, resident.model
    names = native_names(config, model)
    text = render(
        "methods/nanomoe/native.py.jinja",
        title=family_of(config, resident.config.path).title,
        version=version("moevolve"),
        config_class=type(config).__name__,
        model_class=type(model).__name__,
        native_config=names[0],
        native_class=names[1],
        native_type=names[2],
        variant=edit.form.variant,
        blocks=edit.form.blocks,
        rank=edit.form.rank,
    )
    (directory / f"{MODULE}.py").write_text(text, encoding="utf-8")


def _config(source: PreTrainedModel, model_class: type[PreTrainedModel], edit: NanoMoeEdit) -> PretrainedConfig:
    config = native_config(source, model_class)
    config.nanomoe_layers = list(edit.layers)
    config.nanomoe_variant = edit.form.variant
    config.nanomoe_blocks, config.nanomoe_rank = edit.form.blocks, edit.form.rank
    return config
