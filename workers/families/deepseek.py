"""The families with group-limited routing: DeepSeek-V2, DeepSeek-V3, and the many that route like DeepSeek-V3.

DeepSeek-V4 has no groups any more, and its first layers choose experts by token ids. Sources: DeepSeek-V2 (arXiv
2405.04434), Sec. 2.2.2; DeepSeek-V3 (arXiv 2412.19437), Sec. 2.1.2; all as implemented in `transformers`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from moevolve.evaluators.errors import UserError
from moevolve.kernels.routing_rule import RoutingGroups, RoutingRule
from moevolve.workers.families.base import OUTPUT_NORM, STREAMS, ExpertFamily, routing, routing_groups

if TYPE_CHECKING:
    from torch import nn
    from transformers import PretrainedConfig


def deepseek_v2_rule(router: nn.Module, config: PretrainedConfig) -> RoutingRule:
    """Routing rule of DeepSeek-V2: softmax, groups ranked by their best expert, weights times a factor.

    Raises:
        UserError: `topk_method` isn't one that `transformers` computes.
    """
    # `transformers` never rescales the weights, whatever `norm_topk_prob` says.
    method, groups = config.topk_method, RoutingGroups()
    if method == "group_limited_greedy":
        groups = routing_groups(config, best=1)
    elif method != "greedy":
        raise UserError(
            f"a deepseek_v2 model with topk_method {method!r} can't run: transformers computes greedy and "
            "group_limited_greedy; use a checkpoint with one of these"
        )
    return RoutingRule(renormalise=False, groups=groups, scale=float(config.routed_scaling_factor))


_SCALE = "routed_scaling_factor"
# Sigmoids with a correction bias, in groups ranked by their two best experts.
_V3_RULE = routing(scale=_SCALE, scores="sigmoid", best=2)


def axk2_rule(router: nn.Module, config: PretrainedConfig) -> RoutingRule:
    """Routing rule of A.X-K2: that of DeepSeek-V3 without groups.

    Raises:
        UserError: There are groups, whose experts outside a token's best ones rank as 0 instead of last, so that they
            are chosen before others with a negative rank.
    """
    if config.n_group is not None:
        raise UserError("an axk2 model with groups of experts (n_group) isn't supported; those without groups are")
    return _V3_RULE(router, config)


def deepseek_v4_rule(router: nn.Module, config: PretrainedConfig) -> RoutingRule:
    """Routing rule of DeepSeek-V4: roots of softplus with a correction bias, or in first layers by token ids.

    Raises:
        UserError: Its scores are of another kind.
    """
    if config.scoring_func != "sqrtsoftplus":
        raise UserError(
            f"a deepseek_v4 model with scoring_func {config.scoring_func!r} isn't supported; sqrtsoftplus is"
        )
    scale = float(config.routed_scaling_factor)
    return RoutingRule(renormalise=True, scores="sqrt_softplus_of_chosen", scale=scale, rounds=True)


def _resize_extras(config: PretrainedConfig, rule: RoutingRule, active: int) -> None:
    if rule.groups.count == 1 and getattr(config, "n_group", None) is not None:
        # n' need not be a multiple of groups that don't limit the choice.
        config.n_group = config.topk_group = 1


def _deepseek(model_type: str, title: str, **differing: Any) -> ExpertFamily:
    form: dict[str, Any] = {"rule": _V3_RULE, "experts_field": "n_routed_experts", "casts_weights": False}
    form |= {"float32_router": True, "resize_extras": _resize_extras}
    return ExpertFamily(model_type, title, **form | differing)


_LATENT = "its experts work in a narrower space, which a matrix that they share leads out of; a repair fits experts"


def _shared_choices(config: PretrainedConfig) -> str | None:
    alone = "its layers share an indexer's choice of tokens, and a repair runs each on hidden states alone"
    return alone if "shared" in config.indexer_types else None


def _shared_states(config: PretrainedConfig) -> str | None:
    if config.kv_source_layers == list(range(config.num_hidden_layers)):
        return _shared_choices(config)
    return "its layers share keys and values, and a repair runs each on hidden states alone"


DEEPSEEK = (
    _deepseek("deepseek_v2", "DeepSeek-V2", rule=deepseek_v2_rule),
    _deepseek("deepseek_v3", "DeepSeek-V3"),
    _deepseek("deepseek_v32", "DeepSeek-V3.2"),
    _deepseek("glm4_moe", "GLM-4-MoE"),
    _deepseek("glm_moe_dsa", "GLM-5", unrepairable=_shared_choices),
    _deepseek("glm4_moe_lite", "GLM-4.7-Flash"),
    # It also has an indexer that chooses groups of keys by their place in a row.
    _deepseek("glm5_next_text", "GLM-5-Next", packs=False, pads_left=False, unrepairable=lambda config: STREAMS),
    # The linear attention of these passes its state from a sequence of a row to the next.
    _deepseek("kimi_linear", "Kimi-Linear", experts_field="num_experts", packs=False),
    _deepseek("bailing_hybrid", "Ling-2.5", experts_field="num_experts", packs=False),
    _deepseek("mimo_v2_flash", "MiMo-V2-Flash", sdpa=False),
    _deepseek("dots1", "dots.llm1"),
    _deepseek("exaone_moe", "EXAONE-MoE", experts_field="num_experts"),
    _deepseek("solar_open", "Solar-Open"),
    _deepseek("axk1", "A.X-K1", unrepairable=lambda config: OUTPUT_NORM),
    _deepseek("axk2", "A.X-K2", rule=axk2_rule),
    _deepseek(
        "beam",
        "Beam",
        rule=routing(scores="sigmoid", best=2),  # the experts' sum is scaled instead of their weights
        experts_field="num_experts",
        output_scale=lambda config: float(config.routed_scaling_factor),
        unrepairable=lambda config: OUTPUT_NORM,
    ),
    _deepseek("hy_v4", "Hunyuan 4", sdpa=False, unrepairable=lambda config: STREAMS),
    # These have no correction bias.
    _deepseek(
        "mistral_large4_text",
        "Mistral Large 4",
        rule=routing(renormalise=True, scale=_SCALE, best=2),
        unrepairable=_shared_states,
    ),
    _deepseek(
        "mistral4",
        "Mistral 4",
        rule=routing(scale=_SCALE, rounds=True, best=2),
        casts_weights=True,
        float32_router=False,
    ),
    ExpertFamily(
        "deepseek_v4",
        "DeepSeek-V4",
        casts_weights=True,
        rule=deepseek_v4_rule,
        experts_field="n_routed_experts",
        table="tid2eid",
        sdpa=False,
        packs=False,
        pads_left=False,  # it compresses keys by their place in a row
        unrepairable=lambda config: STREAMS,
    ),
    # Its experts have no gates. A layer is an attention, a Mamba mixer, experts or a dense network, all named `mixer`.
    _deepseek(
        "nemotron_h",
        "Nemotron-H and Nemotron-3",
        block="mixer",
        tensors=("up_proj", "down_proj"),
        packs=False,
        experts_input=("fc1_latent_proj",),
        unrepairable=lambda config: None if config.moe_latent_size is None else _LATENT,
    ),
)
