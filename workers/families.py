"""The supported mixture-of-experts families: where their parts are, and how their routers choose."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

from moevolve.evaluators.errors import UserError
from moevolve.kernels.routing_rule import RoutingGroups, RoutingRule

if TYPE_CHECKING:
    from transformers import PretrainedConfig

EXPERT_TENSORS = ("gate_up_proj", "down_proj")
"""The fused expert parameters of families without biases: [n, 2I, H] and [n, H, I]."""

BIASED_EXPERT_TENSORS = ("gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias")
"""Those of GPT-OSS: [n, H, 2I] (gates and ups alternate), [n, 2I], [n, I, H] and [n, H]."""

CORRECTION_BIAS = "e_score_correction_bias"
"""Name of the buffer [n], float32, that some routers add to their scores for choosing only."""


def softmax_rule(router: nn.Module, config: PretrainedConfig) -> RoutingRule:
    """Softmax over all experts, then the top-k, rescaled unless the config says otherwise."""
    return RoutingRule(renormalise=bool(getattr(router, "norm_topk_prob", True)))


def deepseek_v2_rule(router: nn.Module, config: PretrainedConfig) -> RoutingRule:
    """Softmax, groups worth their best expert if there are any, weights times a factor and never rescaled.

    Raises:
        UserError: a way of choosing that `transformers` does not compute.
    """
    method, groups = config.topk_method, RoutingGroups()
    if method == "group_limited_greedy":
        groups = _groups(config, best=1)
    elif method != "greedy":
        raise UserError(
            f"a deepseek_v2 model with topk_method {method!r} can't run: transformers computes greedy and "
            "group_limited_greedy; use a checkpoint with one of these"
        )
    return RoutingRule(renormalise=False, groups=groups, scale=float(config.routed_scaling_factor))


def deepseek_v3_rule(router: nn.Module, config: PretrainedConfig) -> RoutingRule:
    """Sigmoids, ranked with a correction bias within groups worth their two best, weights times a factor."""
    return RoutingRule(
        renormalise=bool(config.norm_topk_prob),
        scores="sigmoid",
        groups=_groups(config, best=2),
        scale=float(config.routed_scaling_factor),
    )


def gpt_oss_rule(router: nn.Module, config: PretrainedConfig) -> RoutingRule:
    """The top-k of the logits, and the softmax of those."""
    return RoutingRule(renormalise=True, scores="softmax_of_chosen")


def _groups(config: PretrainedConfig, best: int) -> RoutingGroups:
    """A limit that lets a token choose from every group is none: the config's groups count as one then."""
    count, chosen = int(config.n_group or 1), int(config.topk_group or 1)
    return RoutingGroups(count, chosen, best) if chosen < count else RoutingGroups(best=best)


@dataclass(frozen=True, slots=True)
class Family:
    """How one `transformers` model type holds its experts and routes.

    Attributes:
        model_type: `model_type` of its config.
        title: what people call it.
        casts_weights: whether routing weights are cast to the router's dtype before the experts see them (Mixtral's
            stay float32).
        rule: makes the routing rule of one router.
        experts_field: where its config counts the experts.
        router: name of the router in a MoE block.
        tensors: names of the fused expert parameters.
        float32_router: whether logits are computed in float32 whatever the router's dtype.
        sdpa: whether `transformers` has its attention as sdpa.
    """

    model_type: str
    title: str
    casts_weights: bool
    rule: Callable[[nn.Module, PretrainedConfig], RoutingRule] = softmax_rule
    experts_field: str = "num_experts"
    router: str = "gate"
    tensors: tuple[str, ...] = EXPERT_TENSORS
    float32_router: bool = False
    sdpa: bool = True


def _deepseek(model_type: str, title: str, rule: Callable[[nn.Module, PretrainedConfig], RoutingRule]) -> Family:
    return Family(model_type, title, False, rule, experts_field="n_routed_experts", float32_router=True)


FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (
        Family("mixtral", "Mixtral", casts_weights=False),
        Family("qwen2_moe", "Qwen1.5/2-MoE", casts_weights=True),
        Family("qwen3_moe", "Qwen3-MoE", casts_weights=True),
        Family("olmoe", "OLMoE", casts_weights=True),
        _deepseek("deepseek_v2", "DeepSeek-V2", deepseek_v2_rule),
        _deepseek("deepseek_v3", "DeepSeek-V3", deepseek_v3_rule),
        _deepseek("glm4_moe", "GLM-4-MoE", deepseek_v3_rule),
        Family(
            "gpt_oss",
            "GPT-OSS",
            casts_weights=True,
            rule=gpt_oss_rule,
            router="router",
            tensors=BIASED_EXPERT_TENSORS,
            sdpa=False,
        ),
    )
}
