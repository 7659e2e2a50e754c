"""FactorLLM edits as checkpoints: a stock Mixtral where that is the same function, else modelling code of its own."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from moevolve.workers.export.card import CheckpointForm, ExportSummary
from moevolve.workers.export.mixtral_form import empty_mixtral, fits_mixtral
from moevolve.workers.export.native import native_config
from moevolve.workers.export.state import filled
from moevolve.workers.families.layers import DenseLayer
from moevolve.workers.methods.base import Edit
from moevolve.workers.methods.contract import ModuleUse, Resident, host_tensor
from moevolve.workers.methods.dense import network_use, placed_layers, write_native_dense
from moevolve.workers.methods.factorllm.edit import FactorLlmEdit

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


class FactorLlmExporter:
    """See `Exporter`."""

    def form(self, resident: Resident, edit: Edit) -> CheckpointForm:
        assert isinstance(edit, FactorLlmEdit)
        same = edit.active == 1 and edit.routers == 1 and edit.output_scale == 1 and not edit.router_bias.any()
        return "stock" if same and fits_mixtral(resident) else "native"

    def summary(self, resident: Resident, edit: Edit, form: CheckpointForm) -> ExportSummary:
        assert isinstance(edit, FactorLlmEdit)
        layers = resident.dense_layers
        networks = sum(each.numel() for layer in layers for each in _tensors(layer).values())
        name = f"{edit.routers}R{edit.experts}E{edit.active}K"
        return ExportSummary(
            experts=edit.experts,
            active=edit.active,
            parameters_before=networks + sum(each.numel() for each in resident.model.parameters()),
            lead=(
                f"{layers[0].family.title} with every feed-forward network divided into {edit.experts} equal experts, "
                f"{edit.active} active per token"
            ),
            method="FactorLLM's division (arXiv 2408.11855)",
            tag="sparse-activation",
            form_note=(
                "The modelling code beside this card routes every token to its experts; it needs `transformers` only."
                if form == "native"
                else "A stock Mixtral checkpoint: no custom code."
            ),
            rows=(("division", name), ("factor on outputs", f"{edit.output_scale:g}")),
        )

    def build(self, resident: Resident, edit: Edit, form: CheckpointForm, directory: Path) -> PreTrainedModel:
        assert isinstance(edit, FactorLlmEdit)
        model, state = _stock(resident, edit) if form == "stock" else _native(resident, edit, directory)
        shared = {name: tensor for name, tensor in resident.model.state_dict().items() if name not in state}
        return filled(model, shared | state, resident.model)


def _stock(resident: Resident, edit: FactorLlmEdit) -> tuple[PreTrainedModel, dict[str, Tensor]]:
    """A Mixtral on the meta device, and the tensors of its networks."""
    state: dict[str, Tensor] = {}
    for i, layer in enumerate(resident.dense_layers):
        assert layer.gate is not None
        gate, up = (each.weight.data.view(edit.experts, -1, layer.hidden) for each in (layer.gate, layer.up))
        down = layer.down.weight.data.view(layer.hidden, edit.experts, -1)
        prefix = f"model.layers.{i}.mlp."
        state[f"{prefix}gate.weight"] = host_tensor(edit.router_weight[i, 0]).to(down.device)
        state[f"{prefix}experts.gate_up_proj"] = torch.cat([gate, up], dim=1)
        state[f"{prefix}experts.down_proj"] = down.transpose(0, 1).contiguous()
    return empty_mixtral(resident, edit.experts, edit.width // edit.experts), state


def _native(resident: Resident, edit: FactorLlmEdit, directory: Path) -> tuple[PreTrainedModel, dict[str, Tensor]]:
    """The native model on the meta device, its code written, and the tensors of its networks."""
    source = resident.model
    model_class = write_native_dense(
        resident,
        directory,
        "methods/factorllm/native.py.jinja",
        width=edit.width,
        experts=edit.experts,
        active=edit.active,
        routers=edit.routers,
        scale=repr(float(edit.output_scale)),
    )
    state: dict[str, Tensor] = {}
    for i, (place, layer) in enumerate(placed_layers(resident)):
        prefix = f"{place}{layer.family.up if layer.family.inline else 'mlp'}."
        state |= {prefix + name: tensor for name, tensor in _tensors(layer).items()}
        for name, array in (("router_weight", edit.router_weight), ("router_bias", edit.router_bias)):
            state[prefix + name] = host_tensor(array[i]).to(layer.up.weight.device)
    with torch.device("meta"):
        return model_class(_config(source, model_class, edit)), state


def _config(source: PreTrainedModel, model_class: type[PreTrainedModel], edit: FactorLlmEdit) -> PretrainedConfig:
    config = native_config(source, model_class)
    config.factor_experts, config.factor_active = edit.experts, edit.active
    config.factor_routers, config.factor_scale = edit.routers, edit.output_scale
    return config


def _tensors(layer: DenseLayer) -> dict[str, Tensor]:
    """A network's tensors as they lie now, by the family's names."""
    family = layer.family
    parts = {family.up: layer.up, family.down: layer.down}
    if layer.gate is not None and family.gate is not None:
        parts[family.gate] = layer.gate
    return {
        f"{name}.{kind}": tensor
        for name, part in parts.items()
        for kind, tensor in part.state_dict(keep_vars=False).items()
    }


def factorized_network_use(module: Any, config: Any) -> ModuleUse:
    """Of `FactorizedNetwork` in `native.py.jinja`: the active experts of all."""
    return network_use(module, config, config.factor_active, config.factor_experts)
