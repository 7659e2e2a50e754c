"""GPT-OSS: the top-k of the logits and the softmax of those, experts with biases, attention without an sdpa form."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moevolve.kernels.routing_rule import RoutingRule
from moevolve.workers.families.base import ExpertFamily

if TYPE_CHECKING:
    from torch import nn
    from transformers import PretrainedConfig

TENSORS = ("gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias")
"""Its fused expert parameters: [n, H, 2I] (gates and ups alternate), [n, 2I], [n, I, H] and [n, H]."""


def gpt_oss_rule(router: nn.Module, config: PretrainedConfig) -> RoutingRule:
    """The top-k of the logits, and the softmax of those."""
    return RoutingRule(renormalise=True, scores="softmax_of_chosen")


def _also_resize(config: PretrainedConfig, rule: RoutingRule, active: int) -> None:
    if hasattr(config, "experts_per_token"):  # published configs say k under both names
        config.experts_per_token = active


GPT_OSS = ExpertFamily(
    "gpt_oss",
    "GPT-OSS",
    casts_weights=True,
    rule=gpt_oss_rule,
    width_field="intermediate_size",
    router="router",
    tensors=TENSORS,
    sdpa=False,
    packs=False,  # its masks are made without the position ids
    also_resize=_also_resize,
)
