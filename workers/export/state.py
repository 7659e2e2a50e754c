"""From an edited resident model to a `transformers` model of fewer experts, ready to be saved."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moevolve.evaluators.errors import UserError
from moevolve.kernels.routing_rule import RoutingRule
from moevolve.workers.export.base import CheckpointForm, filled
from moevolve.workers.export.native import import_native, native_config
from moevolve.workers.families.base import CORRECTION_BIAS, ExpertFamily
from moevolve.workers.families.layers import MoELayer
from moevolve.workers.families.registry import FAMILIES
from moevolve.workers.methods.applicator import host_tensor
from moevolve.workers.methods.base import Edit, IdentityEdit
from moevolve.workers.methods.eep.edit import EepEdit
from moevolve.workers.methods.eep.router import EditableRouter
from moevolve.workers.model.resident import ResidentModel

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


def checkpoint_form(edit: Edit, rule: RoutingRule) -> CheckpointForm:
    """Which form of checkpoint expresses an edit exactly.

    A mapping of the logits folds into a smaller router. A one-hot mapping of the softmax does so too where the family
    rescales the top-k, because the softmax's scale cancels, and one of sigmoids always does. Anything else needs the
    native form.

    Args:
        edit: what was done to the model.
        rule: how the family chooses and weighs experts.

    Raises:
        UserError: this kind of edit has no checkpoint form.
    """
    if isinstance(edit, IdentityEdit):
        return "stock"
    if not isinstance(edit, EepEdit):
        raise UserError(f"edits of kind {type(edit).__name__} can't be exported; export an individual of an EEP search")
    if edit.skip_below is not None:
        raise UserError(
            "dynamic skipping has no checkpoint form: no stock router skips experts; export an individual of a search "
            "without genome.dynamic_skipping"
        )
    folds = edit.router_space == "logits" or (rule.one_hot_folds and bool(edit.one_hot_mapping.all()))
    return "stock" if folds else "native"


def exported_shape(resident: ResidentModel) -> tuple[int, int]:
    """Experts n' and active experts k of the resident model as it is edited now."""
    edit = resident.applied
    if isinstance(edit, EepEdit):
        return edit.retained, edit.active
    return resident.layers[0].count, int(resident.model.config.num_experts_per_tok)


def build_model(resident: ResidentModel, form: CheckpointForm, directory: Path) -> PreTrainedModel:
    """A model that shares the resident's tensors where it can and owns its experts where it must.

    Args:
        resident: with the edit applied that is to be exported.
        form: see `checkpoint_form`.
        directory: where the native form's modelling code has been written.

    Returns:
        A model in the exported shape, on the resident's device, fit for `save_pretrained`.
    """
    source = resident.model
    model_class: type[PreTrainedModel] = type(source) if form == "stock" else import_native(directory)
    with torch.device("meta"):
        model = model_class(_config(resident, form, model_class))
    state = {name: tensor for name, tensor in unwrapped_state(source).items() if ".mlp.experts." not in name}
    for ordinal, layer in enumerate(resident.layers):
        prefix = f"model.layers.{layer.index}.mlp."
        router = f"{prefix}{layer.family.router}."
        for name, tensor in _experts(resident, ordinal).items():
            state[f"{prefix}experts.{name}"] = tensor
        if form == "stock":
            for name, tensor in _router_tensors(layer).items():
                state[router + name] = tensor
        else:
            mapping = _eep(resident.applied).router_mapping[ordinal]
            state[f"{router}router_mapping"] = host_tensor(mapping).to(layer.router_weight.device)
    return filled(model, state, source)


def _config(resident: ResidentModel, form: CheckpointForm, model_class: type[PreTrainedModel]) -> PretrainedConfig:
    retained, active = exported_shape(resident)
    source = resident.model
    config = native_config(source, model_class) if form == "native" else copy.deepcopy(source.config)
    if form == "native":
        config.router_experts = resident.layers[0].count
        edit = _eep(resident.applied)
        config.one_hot_layers = [
            layer.index for layer, one_hot in zip(resident.layers, edit.one_hot_mapping, strict=True) if one_hot
        ]
    first = resident.layers[0]
    first.family.resize(config, first.rule, retained, active)
    return config


def unwrapped_state(model: PreTrainedModel) -> dict[str, Tensor]:
    """The model's state under the names its family gives: without the wrappers around routers of experts."""
    routers = {each.router for each in FAMILIES.values() if isinstance(each, ExpertFamily)}
    wrapped = tuple(f".{router}.inner." for router in routers)
    state = {}
    for name, tensor in model.state_dict().items():
        for infix in wrapped:
            name = name.replace(infix, infix.removesuffix("inner."))
        state[name] = tensor
    return state


def _eep(edit: Edit) -> EepEdit:
    assert isinstance(edit, EepEdit)
    return edit


def _router(layer: MoELayer) -> EditableRouter:
    gate = layer.gate
    assert isinstance(gate, EditableRouter)
    return gate


def loaded_parameters(resident: ResidentModel) -> int:
    """Parameters of the model with the experts that it was loaded with."""
    count = sum(parameter.numel() for parameter in resident.model.parameters())
    # What it has now may be buffers of another size.
    for layer in resident.layers:
        for tensor in layer.expert_tensors().values():
            count += (layer.count - tensor.shape[0]) * tensor.shape[1:].numel()
    return count


def originals_of(resident: ResidentModel, ordinal: int) -> dict[str, Tensor]:
    """A MoE layer's experts as they were loaded, on the layer's device."""
    device = resident.layers[ordinal].router_weight.device
    return {name: tensor.to(device) for name, tensor in resident.original_experts(ordinal).items()}


def _experts(resident: ResidentModel, ordinal: int) -> dict[str, Tensor]:
    """A MoE layer's n' experts as the edit has them now, in the edit's order."""
    layer = resident.layers[ordinal]
    plan = _router(layer).plan
    if plan is None:
        return originals_of(resident, ordinal)
    tensors = {name: tensor.data for name, tensor in layer.expert_tensors().items()}
    if plan.slots is None:
        return tensors
    return {name: tensor.index_select(0, plan.slots) for name, tensor in tensors.items()}


def _router_tensors(layer: MoELayer) -> dict[str, Tensor]:
    """A stock router's tensors: `W_RM W_G`, and `W_RM b` of the biases the family has."""
    plan = _router(layer).plan
    weight, bias, correction = layer.router_weight.data, layer.router_bias, layer.correction_bias
    if plan is not None and plan.folded is not None:
        weight, bias, correction = plan.folded, plan.folded_bias, plan.correction
    elif plan is not None:
        assert plan.selected is not None
        weight, correction = weight.index_select(0, plan.selected), plan.correction
        bias = None if bias is None else bias.index_select(0, plan.selected)
    tensors = {"weight": weight, "bias": bias, CORRECTION_BIAS: correction}
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}
