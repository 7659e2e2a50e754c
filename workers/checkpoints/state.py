"""The tensors of a model: those of its parts, their names in checkpoints, and loading some of them."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from moevolve.workers.contract.methods import Resident
from moevolve.workers.families.decoder import decoder_layers, decoder_of
from moevolve.workers.families.registry import expert_family

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


def experts_prefix(model: PreTrainedModel) -> str:
    """Return the prefix of the names of routed experts' tensors within a decoder layer."""
    family = expert_family(model.config.model_type)
    return "mlp.experts." if family is None else f"{family.prefix}experts."


def empty_model(
    model_class: type[PreTrainedModel], config: PretrainedConfig, dtype: torch.dtype, **form: str
) -> PreTrainedModel:
    """Build a model on the meta device, with its tied tensors tied; the config is copied.

    Modules may set a parameter dtype of their own instead of `dtype`. `form` has the backends of attention and experts,
    as arguments of `from_pretrained`.
    """
    with torch.device("meta"):
        # `_from_config` is the only way to build a class that isn't registered with the auto classes.
        model: PreTrainedModel = model_class._from_config(copy.deepcopy(config), dtype=dtype, **form)  # noqa: SLF001
    model.tie_weights()
    model.requires_grad_(False)
    return model.eval()


def layers_prefix(model: PreTrainedModel) -> str:
    """Return the prefix of names of tensors within decoder layers, up to the layer's index."""
    decoder = next(name for name, module in model.named_modules() if module is decoder_of(model))
    return f"{decoder}.layers."


def frame_state(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the tensors outside the decoder layers by name, tied tensors once."""
    layers, tied = layers_prefix(model), model.all_tied_weights_keys
    state = model.state_dict().items()
    return {name: tensor for name, tensor in state if not name.startswith(layers) and name not in tied}


def layer_state(resident: Resident, index: int) -> dict[str, Tensor]:
    """Return the tensors of a decoder layer with the current edit, by the family's names within the layer.

    Routed experts are left out, because edits may keep them elsewhere.
    """
    family, experts = expert_family(resident.model.config.model_type), experts_prefix(resident.model)
    state = {}
    # An edit wraps the router, whose own tensors are then below `inner`.
    for name, tensor in decoder_layers(resident.model)[index].state_dict().items():
        if name.startswith(experts):
            continue
        router = "" if family is None else f"{family.prefix}{family.router}."
        state[name.replace(f"{router}inner.", router) if router else name] = tensor
    return state


def ordinal_of(resident: Resident, index: int) -> int | None:
    """Return the number of a decoder layer among the MoE layers; None if it isn't one."""
    return next((ordinal for ordinal, layer in enumerate(resident.layers) if layer.index == index), None)


def unedited_parameters(resident: Resident) -> int:
    """Return the number of parameters of the unedited model, whatever edit is applied; tied tensors count once."""
    model = resident.model
    return sum(each.numel() for each in empty_model(type(model), model.config, model.dtype).parameters())


class SavedNames:
    """Maps a model's tensors to their names in checkpoints, which differ because `transformers` fuses experts.

    Attributes:
        tensors: Tensors as saved, on the meta device and by name in the checkpoint, for every name in the model.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import PrefixChange

        self._model = model
        # What `save_pretrained` uses for a model that wasn't loaded. Finding it visits every module.
        conversions = get_model_conversion_mapping(model, add_legacy=False)
        self._conversions = [each for each in conversions if not isinstance(each, PrefixChange)]
        tied = model.all_tied_weights_keys
        self.tensors = {
            name: self.saved(name, tensor) for name, tensor in model.state_dict().items() if name not in tied
        }

    def saved(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        """Split a tensor with the model's shape into the tensors of the checkpoint, as views where possible."""
        from transformers.core_model_loading import revert_weight_conversion

        self._model._weight_conversions = self._conversions  # noqa: SLF001 - where `revert_weight_conversion` looks
        return dict(revert_weight_conversion(self._model, {name: tensor}))


def load_part(
    model: PreTrainedModel,
    conversions: Sequence[object],
    tensors: Mapping[str, object],
    device: torch.device,
    dtype: torch.dtype,
) -> Any:
    """Load those of a model's tensors that a checkpoint's tensors make up, as `from_pretrained` loads whole models.

    Args:
        model: Model, some or all of whose tensors are on the meta device.
        conversions: Result of `get_model_conversion_mapping` of `transformers`, which visits every module.
        tensors: Tensors by name in the checkpoint, or objects that return them on `tensor[...]`.
        device: Device to load to.
        dtype: Parameter dtype, except for modules that set their own.

    Returns:
        What `transformers` reports of names and shapes that don't match.
    """
    from transformers.core_model_loading import convert_and_load_state_dict_in_model
    from transformers.modeling_utils import LoadStateDictConfig

    how = LoadStateDictConfig(
        device_map={"": device},
        dtype=dtype,
        dtype_plan=model._get_dtype_plan(dtype),  # noqa: SLF001 - as `from_pretrained` makes it
        weight_mapping=list(conversions),
    )
    info, _ = convert_and_load_state_dict_in_model(model, dict(tensors), how)
    return info


def restore_buffers(model: PreTrainedModel, device: torch.device) -> None:
    """Recreate the buffers that checkpoints don't have, such as those of position embeddings, from the config."""
    for name in {name.rpartition(".")[0] for name, _ in model.named_non_persistent_buffers()}:
        module: Any = model.get_submodule(name)
        if isinstance(module, torch.nn.Embedding):  # Gemma's, which has a weight besides
            scale = torch.tensor(module.scalar_embed_scale, device=device)
            module.register_buffer("embed_scale", scale, persistent=False)
        else:
            model.set_submodule(name, type(module)(config=model.config).to(device))
