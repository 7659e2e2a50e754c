"""Loads parts of a model that is on the meta device, as `from_pretrained` loads whole ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def load_part(
    model: PreTrainedModel,
    conversions: Sequence[Any],
    tensors: Mapping[str, Any],
    device: torch.device,
    dtype: torch.dtype,
) -> Any:
    """Load those of a model's tensors that a checkpoint's tensors make up; the others stay as they are.

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
