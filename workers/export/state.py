"""The tensors of a checkpoint: what exporters take of a resident model, and how a model is filled with them."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

from torch import Tensor

from moevolve.workers.families.base import ExpertFamily
from moevolve.workers.families.registry import FAMILIES
from moevolve.workers.methods.contract import Resident

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def filled(model: PreTrainedModel, state: dict[str, Tensor], source: PreTrainedModel) -> PreTrainedModel:
    """`model`, fit for `save_pretrained`: with all its tensors, which are shared, and how `source` generates.

    Args:
        model: on the meta device.
        state: every tensor of it by name; tied ones may be left out.
        source: the resident model.
    """
    model.load_state_dict(state, strict=True, assign=True)
    model.tie_weights()
    model.requires_grad_(False)
    if source.generation_config is not None:
        model.generation_config = copy.deepcopy(source.generation_config)
    return model.eval()


def unwrapped_state(model: PreTrainedModel) -> dict[str, Tensor]:
    """The model's state under the names its family gives: without the wrappers around routers of experts."""
    routers = {each.router for each in FAMILIES.values() if isinstance(each, ExpertFamily)}
    wrapped = tuple(f".{router}.inner." for router in routers)
    state = {}
    for name, tensor in model.state_dict().items():
        given = name
        for infix in wrapped:
            given = given.replace(infix, infix.removesuffix("inner."))
        state[given] = tensor
    return state


def originals_of(resident: Resident, ordinal: int) -> dict[str, Tensor]:
    """A MoE layer's experts as they were loaded, on the layer's device."""
    device = resident.layers[ordinal].router_weight.device
    return {name: tensor.to(device) for name, tensor in resident.original_experts(ordinal).items()}


def loaded_parameters(resident: Resident) -> int:
    """Parameters of the model with the experts that it was loaded with."""
    count = sum(parameter.numel() for parameter in resident.model.parameters())
    # What it has now may be buffers of another size.
    for layer in resident.layers:
        for tensor in layer.expert_tensors().values():
            count += (layer.count - tensor.shape[0]) * tensor.shape[1:].numel()
    return count
