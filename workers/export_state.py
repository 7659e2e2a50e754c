"""From an edited resident model to a `transformers` model of fewer experts, ready to be saved."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moevolve.evaluators.errors import UserError
from moevolve.workers.edits.base import Edit, IdentityEdit
from moevolve.workers.edits.eep import EepEdit
from moevolve.workers.edits.router import EditableRouter
from moevolve.workers.edits.tensors import host_tensor
from moevolve.workers.export_base import CheckpointForm
from moevolve.workers.layout import EXPERT_TENSORS, MoELayer
from moevolve.workers.native import MODULE, import_native, native_names
from moevolve.workers.resident import ResidentModel

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


def checkpoint_form(edit: Edit, renormalise: bool) -> CheckpointForm:
    """Which form of checkpoint expresses an edit exactly.

    A mapping of the logits folds into a smaller router. A one-hot mapping of the softmax does so too where the family
    rescales the top-k, because the softmax's scale cancels. Anything else needs the native form.

    Args:
        edit: what was done to the model.
        renormalise: whether the family rescales the top-k routing weights to sum 1.

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
    folds = edit.router_space == "logits" or (renormalise and bool(edit.one_hot_mapping.all()))
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
    state = {
        name.replace(".gate.inner.", ".gate."): tensor
        for name, tensor in source.state_dict().items()
        if ".mlp.experts." not in name
    }
    for ordinal, layer in enumerate(resident.layers):
        prefix = f"model.layers.{layer.index}.mlp."
        for name, tensor in _experts(layer).items():
            state[f"{prefix}experts.{name}"] = tensor
        if form == "stock":
            state[f"{prefix}gate.weight"] = _router_rows(layer)
        else:
            mapping = _eep(resident.applied).router_mapping[ordinal]
            state[f"{prefix}gate.router_mapping"] = host_tensor(mapping).to(layer.router_weight.device)
    model.load_state_dict(state, strict=True, assign=True)
    model.tie_weights()
    model.requires_grad_(False)
    if source.generation_config is not None:
        model.generation_config = copy.deepcopy(source.generation_config)
    return model.eval()


def _config(resident: ResidentModel, form: CheckpointForm, model_class: type[PreTrainedModel]) -> PretrainedConfig:
    retained, active = exported_shape(resident)
    source = resident.model
    config = copy.deepcopy(source.config)
    if form == "native":
        settings = {k: v for k, v in config.to_dict().items() if k not in ("model_type", "architectures")}
        assert model_class.config_class is not None
        config = model_class.config_class(**settings)
        native_config, native_class, _ = native_names(source.config, source)
        config.router_experts = resident.layers[0].count
        edit = _eep(resident.applied)
        config.one_hot_layers = [
            layer.index for layer, one_hot in zip(resident.layers, edit.one_hot_mapping, strict=True) if one_hot
        ]
        config.auto_map = {
            "AutoConfig": f"{MODULE}.{native_config}",
            "AutoModelForCausalLM": f"{MODULE}.{native_class}",
        }
    config.num_experts = retained
    config.num_experts_per_tok = active
    return config


def _eep(edit: Edit) -> EepEdit:
    assert isinstance(edit, EepEdit)
    return edit


def _router(layer: MoELayer) -> EditableRouter:
    gate = layer.block.gate
    assert isinstance(gate, EditableRouter)
    return gate


def _experts(layer: MoELayer) -> dict[str, Tensor]:
    """The layer's n' experts as the edit has them now, in the edit's order."""
    plan = _router(layer).plan
    tensors = {name: getattr(layer.experts, name).data for name in EXPERT_TENSORS}
    if plan is None or plan.slots is None:
        return tensors
    return {name: tensor.index_select(0, plan.slots) for name, tensor in tensors.items()}


def _router_rows(layer: MoELayer) -> Tensor:
    """The rows of a stock router: `W_RM W_G`."""
    plan = _router(layer).plan
    if plan is None:
        return layer.router_weight.data
    if plan.folded is not None:
        return plan.folded
    assert plan.selected is not None
    return layer.router_weight.data.index_select(0, plan.selected)
