"""Counts the parameters that a token uses of a model, from the model's modules."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from moevolve.workers.families.registry import active_experts
from moevolve.workers.methods.registry import METHODS

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


def active_parameters(model: PreTrainedModel) -> int:
    """Count the parameters that a token uses of an unedited model of a supported family, or of a native checkpoint.

    All count but those of experts that aren't chosen, and of neurons of other experts. Where several routers must
    agree, and where a mask is applied to a finished product, a token may need fewer.
    """
    idle = sum(_idle(module, model.config) for module in model.modules())
    return sum(each.numel() for each in model.parameters()) - idle


def _idle(module: nn.Module, config: PretrainedConfig) -> int:
    """Return the number of a module's own parameters that a token doesn't use."""
    for method in METHODS.values():
        if type(module).__name__ in method.idle:  # a module of a native checkpoint
            return method.idle[type(module).__name__](module, config)
    own: dict[str, nn.Parameter] = dict(module.named_parameters(recurse=False))
    if "down_proj" not in own:
        return 0
    count = len(own["down_proj"])  # fused experts, with tensors [n, ...]
    return sum(each.numel() for each in own.values()) * (count - active_experts(config)) // count
