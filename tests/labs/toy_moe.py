"""A model of experts that `transformers` doesn't have: a Mixtral with a router of another kind and name.

In a file of its own, because `transformers` reads in a model's source whether the backend of its experts can be set.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import MixtralConfig
from transformers.integrations import use_experts_implementation
from transformers.models.mixtral.modeling_mixtral import (
    MixtralExperts,
    MixtralForCausalLM,
    MixtralModel,
    MixtralTopKRouter,
)

SCALE = 1.5
"""Constant factor on routing weights."""


class ToyConfig(MixtralConfig):
    """Counts the experts once more, as text; the other fields are for `plain_families`."""

    model_type = "toy_moe"
    chosen: str = ""
    norm_topk_prob: bool = False
    moe_routed_scaling_factor: float = SCALE


class ToyTopKRouter(MixtralTopKRouter):
    """Weights are not rescaled, but multiplied by a constant."""

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        scores = nn.functional.linear(hidden_states.reshape(-1, self.hidden_dim), self.weight)
        weights, chosen = torch.topk(scores.float().softmax(dim=-1), self.top_k, dim=-1)
        return scores, SCALE * weights, chosen


@use_experts_implementation
class ToyExperts(MixtralExperts):
    """Mixtral's."""


class ToyBlock(nn.Module):
    """Its router isn't called gate."""

    def __init__(self, config: ToyConfig) -> None:
        super().__init__()
        self.chooser = ToyTopKRouter(config)
        self.experts = ToyExperts(config)

    def forward(self, hidden_states: Tensor) -> Tensor:
        flat = hidden_states.reshape(-1, hidden_states.shape[-1])
        _, weights, chosen = self.chooser(flat)
        return self.experts(flat, chosen, weights).reshape(hidden_states.shape)


class ToyModel(MixtralModel):
    def __init__(self, config: ToyConfig) -> None:
        super().__init__(config)
        for layer in self.layers:
            layer.mlp = ToyBlock(config)
        self.post_init()


class ToyForCausalLM(MixtralForCausalLM):
    config_class = ToyConfig

    def __init__(self, config: ToyConfig) -> None:
        super().__init__(config)
        self.model = ToyModel(config)
        self.post_init()
