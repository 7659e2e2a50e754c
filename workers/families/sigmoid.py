"""Families that weight experts by sigmoids, most of them with a correction bias, without routing groups."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moevolve.evaluators.errors import UserError
from moevolve.kernels.routing_rule import RoutingRule
from moevolve.workers.families.base import OUTPUT_NORM, ExpertFamily

if TYPE_CHECKING:
    from torch import nn
    from transformers import PretrainedConfig


def minimax_m2_rule(router: nn.Module, config: PretrainedConfig) -> RoutingRule:
    """Routing rule of MiniMax-M2: sigmoids with a correction bias, rescaled."""
    return RoutingRule(renormalise=True, scores="sigmoid")


MINIMAX_M2 = ExpertFamily(
    "minimax_m2",
    "MiniMax-M2",
    casts_weights=False,
    rule=minimax_m2_rule,
    experts_field="num_local_experts",
    width_field="intermediate_size",
    correction_in_block=True,
)


def hy_v3_rule(router: nn.Module, config: PretrainedConfig) -> RoutingRule:
    """Routing rule of Hunyuan 3: sigmoids with a correction bias, rescaled, times a factor."""
    return RoutingRule(renormalise=True, scores="sigmoid", scale=float(config.router_scaling_factor))


HY_V3 = ExpertFamily(
    "hy_v3",
    "Hunyuan 3",
    casts_weights=False,
    rule=hy_v3_rule,
    float32_router=True,
    correction_in_block=True,
)


def lfm2_rule(router: nn.Module, config: PretrainedConfig) -> RoutingRule:
    """Routing rule of LFM2-MoE: sigmoids, as its config says with a correction bias and rescaled, times a factor."""
    # Its 1e-6 on the divisor is neglected.
    return RoutingRule(
        renormalise=bool(config.norm_topk_prob), scores="sigmoid", scale=float(config.routed_scaling_factor)
    )


LFM2_MOE = ExpertFamily(
    "lfm2_moe",
    "LFM2-MoE",
    casts_weights=True,
    rule=lfm2_rule,
    block="feed_forward",
    correction="expert_bias",
    correction_in_block=True,
    packs=False,  # its convolutions pass over the ends of sequences
)


def laguna_rule(router: nn.Module, config: PretrainedConfig) -> RoutingRule:
    """Routing rule of Laguna: sigmoids with a correction bias, rescaled.

    Raises:
        UserError: Logits are capped, so a mapping of logits isn't one of router rows.
    """
    if config.moe_router_logit_softcapping:
        raise UserError("a laguna model that caps its router's logits (moe_router_logit_softcapping) isn't supported")
    return RoutingRule(renormalise=True, scores="sigmoid")


LAGUNA = ExpertFamily(
    "laguna",
    "Laguna",
    casts_weights=True,
    rule=laguna_rule,
    output_scale=lambda config: float(config.moe_routed_scaling_factor),
)


def afmoe_rule(router: nn.Module, config: PretrainedConfig) -> RoutingRule:
    """Routing rule of AFMoE: sigmoids with a correction bias, rescaled, times a factor."""
    return RoutingRule(renormalise=True, scores="sigmoid", scale=float(config.route_scale))


AFMOE = ExpertFamily(
    "afmoe",
    "AFMoE (Trinity)",
    casts_weights=False,
    rule=afmoe_rule,
    router="router",
    weight="gate.weight",
    correction="expert_bias",
    correction_in_block=True,
    takes_sequences=True,
    packs=False,  # it builds attention masks without position ids
    unrepairable=lambda config: OUTPUT_NORM,
)


def flint_rule(router: nn.Module, config: PretrainedConfig) -> RoutingRule:
    """Routing rule of Flint: sigmoids without a correction bias, rescaled if its config says so."""
    return RoutingRule(renormalise=bool(config.norm_topk_prob), scores="sigmoid")


FLINT = ExpertFamily("flint", "Flint", casts_weights=False, rule=flint_rule, float32_router=True, sdpa=False)


def kolibri_rule(router: nn.Module, config: PretrainedConfig) -> RoutingRule:
    """Routing rule of Kolibri-1: the top-k of the logits plus a correction bias, weighted by sigmoids of the logits."""
    return RoutingRule(renormalise=bool(config.norm_topk_prob), scores="sigmoid_of_chosen")


KOLIBRI = ExpertFamily(
    "kolibri1",
    "Kolibri-1",
    casts_weights=False,
    rule=kolibri_rule,
    float32_router=True,
    unrepairable=lambda config: OUTPUT_NORM,
)
