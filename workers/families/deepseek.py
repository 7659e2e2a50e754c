"""DeepSeek-V2 and -V3, and GLM-4-MoE, which routes like DeepSeek-V3.

Sources: DeepSeek-V2 (arXiv 2405.04434), Sec. 2.2.2; DeepSeek-V3 (arXiv 2412.19437), Sec. 2.1.2; as `transformers` runs
them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from moevolve.evaluators.errors import UserError
from moevolve.kernels.routing_rule import RoutingGroups, RoutingRule
from moevolve.workers.families.base import ExpertFamily, MakesRule

if TYPE_CHECKING:
    from torch import nn
    from transformers import PretrainedConfig


def deepseek_v2_rule(router: nn.Module, config: PretrainedConfig) -> RoutingRule:
    """Softmax, groups worth their best expert if there are any, weights times a factor.

    `transformers` never rescales them, whatever the config's `norm_topk_prob`.

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


def _groups(config: PretrainedConfig, best: int) -> RoutingGroups:
    """A limit that lets a token choose from every group is none: the config's groups count as one then."""
    count, chosen = int(config.n_group or 1), int(config.topk_group or 1)
    return RoutingGroups(count, chosen, best) if chosen < count else RoutingGroups(best=best)


def _also_resize(config: PretrainedConfig, rule: RoutingRule, active: int) -> None:
    if rule.groups.count == 1 and getattr(config, "n_group", None) is not None:
        # Groups that limit nothing need not divide n'.
        config.n_group = config.topk_group = 1
    if getattr(config, "num_nextn_predict_layers", 0):
        config.num_nextn_predict_layers = 0  # layers for speculative decoding are never loaded, so not exported


def _deepseek(model_type: str, title: str, rule: MakesRule) -> ExpertFamily:
    return ExpertFamily(
        model_type,
        title,
        casts_weights=False,
        rule=rule,
        experts_field="n_routed_experts",
        float32_router=True,
        also_resize=_also_resize,
    )


DEEPSEEK_V2 = _deepseek("deepseek_v2", "DeepSeek-V2", deepseek_v2_rule)
DEEPSEEK_V3 = _deepseek("deepseek_v3", "DeepSeek-V3", deepseek_v3_rule)
GLM4_MOE = _deepseek("glm4_moe", "GLM-4-MoE", deepseek_v3_rule)
