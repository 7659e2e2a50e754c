"""How the routers of each supported mixture-of-experts family choose and weigh experts."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import nn

from moevolve.evaluators.errors import UserError
from moevolve.kernels.routing_rule import RoutingGroups, RoutingRule

if TYPE_CHECKING:
    from transformers import PretrainedConfig

MakesRule = Callable[[nn.Module, "PretrainedConfig"], RoutingRule]
"""From a router and its model's config."""


def softmax_rule(router: nn.Module, config: PretrainedConfig) -> RoutingRule:
    """Softmax over all experts, then the top-k, rescaled unless the config says otherwise."""
    return RoutingRule(renormalise=bool(getattr(router, "norm_topk_prob", True)))


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


def gpt_oss_rule(router: nn.Module, config: PretrainedConfig) -> RoutingRule:
    """The top-k of the logits, and the softmax of those."""
    return RoutingRule(renormalise=True, scores="softmax_of_chosen")


def _groups(config: PretrainedConfig, best: int) -> RoutingGroups:
    """A limit that lets a token choose from every group is none: the config's groups count as one then."""
    count, chosen = int(config.n_group or 1), int(config.topk_group or 1)
    return RoutingGroups(count, chosen, best) if chosen < count else RoutingGroups(best=best)
