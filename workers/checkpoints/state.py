"""The tensors of an exported model: what exporters take of a resident model, and what checkpoints call them."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from moevolve.workers.contract.methods import Resident
from moevolve.workers.families.base import ExpertFamily
from moevolve.workers.families.decoder import decoder_layers
from moevolve.workers.families.registry import FAMILIES

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

EXPERTS = "mlp.experts."
"""What names of routed experts' tensors begin with, within a decoder layer."""


def empty_model(
    model_class: type[PreTrainedModel], config: PretrainedConfig, dtype: torch.dtype, **form: Any
) -> PreTrainedModel:
    """A model on the meta device, its shared tensors shared.

    Args:
        model_class: its class.
        config: its settings.
        dtype: of the parameters that don't ask for another one themselves.
        form: how it computes attention and experts, as `from_pretrained` takes it.
    """
    with torch.device("meta"):
        # The one way to a class that isn't registered; the dtype is the default one while it is built.
        model: PreTrainedModel = model_class._from_config(copy.deepcopy(config), dtype=dtype, **form)  # noqa: SLF001
    model.tie_weights()
    model.requires_grad_(False)
    return model.eval()


def layers_prefix(model: PreTrainedModel) -> str:
    """What the names of tensors within decoder layers begin with, before the number of the layer."""
    decoder = next(name for name, module in model.named_modules() if module is model.get_decoder())
    return f"{decoder}.layers."


def frame_state(model: PreTrainedModel) -> dict[str, Tensor]:
    """Every tensor outside the decoder layers, by name; of shared ones only the one that is saved."""
    layers, shared = layers_prefix(model), model.all_tied_weights_keys
    state = model.state_dict().items()
    return {name: tensor for name, tensor in state if not name.startswith(layers) and name not in shared}


def layer_state(resident: Resident, index: int) -> dict[str, Tensor]:
    """Tensors of a decoder layer as it is edited now, by the names that the family gives them within it.

    Routed experts are left out: they may be elsewhere.
    """
    routers = {each.router for each in FAMILIES.values() if isinstance(each, ExpertFamily)}
    wrapped = tuple(f"mlp.{router}.inner." for router in routers)
    state = {}
    for name, tensor in decoder_layers(resident.model)[index].state_dict().items():
        if name.startswith(EXPERTS):
            continue
        infix = next((each for each in wrapped if name.startswith(each)), None)
        state[name if infix is None else name.replace(infix, infix.removesuffix("inner."))] = tensor
    return state


def ordinal_of(resident: Resident, index: int) -> int | None:
    """Number of a decoder layer among the MoE layers; None if it isn't one."""
    return next((place for place, layer in enumerate(resident.layers) if layer.index == index), None)


def loaded_parameters(resident: Resident) -> int:
    """Parameters of the model with the experts that it was loaded with."""
    count = sum(parameter.numel() for parameter in resident.model.parameters())
    # What it has now may be buffers of another size.
    for layer in resident.layers:
        for tensor in layer.expert_tensors().values():
            count += (layer.count - tensor.shape[0]) * tensor.shape[1:].numel()
    return count


class SavedNames:
    """What `transformers` calls a model's tensors in checkpoints: it fuses experts while it loads them."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Learn the names.

        Args:
            model: on the meta device, made from its config.
        """
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import PrefixChange

        self._model: Any = model
        # As `save_pretrained` has it of a model that wasn't loaded; found once, because it looks at every module.
        conversions = get_model_conversion_mapping(model, add_legacy=False)
        self._conversions = [each for each in conversions if not isinstance(each, PrefixChange)]
        shared = model.all_tied_weights_keys
        self.tensors = {
            name: self.saved(name, tensor) for name, tensor in model.state_dict().items() if name not in shared
        }
        """By name in the model: what it is saved as, by name in checkpoints, on the meta device."""

    def saved(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        """A tensor of the model as it is saved, views of it where they can be.

        Args:
            name: in the model.
            tensor: any with the shape that the model has there.
        """
        from transformers.core_model_loading import revert_weight_conversion

        self._model._weight_conversions = self._conversions  # noqa: SLF001 - where `revert_weight_conversion` looks
        return dict(revert_weight_conversion(self._model, {name: tensor}))
