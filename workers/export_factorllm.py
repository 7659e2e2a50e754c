"""FactorLLM edits as checkpoints: a stock Mixtral where that is the same function, else modelling code of its own."""

from __future__ import annotations

import copy
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from moevolve.workers.dense_layout import DenseLayer
from moevolve.workers.edits.base import Edit
from moevolve.workers.edits.factorllm import FactorLlmEdit
from moevolve.workers.edits.tensors import host_tensor
from moevolve.workers.export_base import CheckpointForm, ExportSummary
from moevolve.workers.mixtral_form import empty_mixtral, fits_mixtral
from moevolve.workers.native import MODULE, import_native, native_names
from moevolve.workers.resident import ResidentModel
from moevolve.workers.templates import render

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


class FactorLlmExporter:
    """See `Exporter`."""

    def form(self, resident: ResidentModel, edit: Edit) -> CheckpointForm:
        assert isinstance(edit, FactorLlmEdit)
        same = edit.active == 1 and edit.routers == 1 and edit.output_scale == 1 and not edit.router_bias.any()
        return "stock" if same and fits_mixtral(resident) else "native"

    def summary(self, resident: ResidentModel, form: CheckpointForm) -> ExportSummary:
        edit, layers = _edit(resident), resident.dense_layers
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

    def build(self, resident: ResidentModel, form: CheckpointForm, directory: Path) -> PreTrainedModel:
        model, state = _stock(resident) if form == "stock" else _native(resident, directory)
        shared = {name: tensor for name, tensor in resident.model.state_dict().items() if name not in state}
        model.load_state_dict(shared | state, strict=True, assign=True)
        model.tie_weights()
        model.requires_grad_(False)
        if resident.model.generation_config is not None:
            model.generation_config = copy.deepcopy(resident.model.generation_config)
        return model.eval()


def _stock(resident: ResidentModel) -> tuple[PreTrainedModel, dict[str, Tensor]]:
    """A Mixtral on the meta device, and the tensors of its networks."""
    edit = _edit(resident)
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


def _native(resident: ResidentModel, directory: Path) -> tuple[PreTrainedModel, dict[str, Tensor]]:
    """The native model on the meta device, its code written, and the tensors of its networks."""
    edit, source = _edit(resident), resident.model
    names = native_names(source.config, source)
    (directory / f"{MODULE}.py").write_text(_code(resident, names), encoding="utf-8")
    model_class = import_native(directory)
    config = _native_config(source.config, model_class, names, edit)
    decoder = next(name for name, module in source.named_modules() if module is source.get_decoder())
    state: dict[str, Tensor] = {}
    for i, layer in enumerate(resident.dense_layers):
        place = layer.family.up if layer.family.inline else "mlp"
        prefix = f"{decoder}.layers.{layer.index}.{place}."
        state |= {prefix + name: tensor for name, tensor in _tensors(layer).items()}
        for name, array in (("router_weight", edit.router_weight), ("router_bias", edit.router_bias)):
            state[prefix + name] = host_tensor(array[i]).to(layer.up.weight.device)
    with torch.device("meta"):
        return model_class(config), state


def _native_config(
    source: PretrainedConfig, model_class: type[PreTrainedModel], names: tuple[str, str, str], edit: FactorLlmEdit
) -> PretrainedConfig:
    assert model_class.config_class is not None
    settings = {k: v for k, v in source.to_dict().items() if k not in ("model_type", "architectures")}
    config: Any = model_class.config_class(**copy.deepcopy(settings))
    config.factor_experts, config.factor_active = edit.experts, edit.active
    config.factor_routers, config.factor_scale = edit.routers, edit.output_scale
    config.auto_map = {"AutoConfig": f"{MODULE}.{names[0]}", "AutoModelForCausalLM": f"{MODULE}.{names[1]}"}
    return config  # type: ignore[no-any-return]


def _code(resident: ResidentModel, names: tuple[str, str, str]) -> str:
    edit, family = _edit(resident), resident.dense_layers[0].family
    return render(
        "native_factorllm.py.jinja",
        title=family.title,
        version=version("moevolve"),
        width=edit.width,
        experts=edit.experts,
        active=edit.active,
        routers=edit.routers,
        scale=repr(float(edit.output_scale)),
        config_class=type(resident.model.config).__name__,
        model_class=type(resident.model).__name__,
        native_config=names[0],
        native_class=names[1],
        native_type=names[2],
        up=family.up,
        gate=repr(family.gate),
        down=family.down,
        activation=family.activation,
        inline=family.inline,
    )


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


def _edit(resident: ResidentModel) -> FactorLlmEdit:
    edit = resident.applied
    assert isinstance(edit, FactorLlmEdit)
    return edit
