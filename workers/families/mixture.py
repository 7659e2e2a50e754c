"""Families with a softmax, or with sigmoids as their configs say: Mixtral, Qwen's, OLMoE, GPT-OSS and others."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from moevolve.evaluators.errors import UserError
from moevolve.kernels.routing_rule import RoutingRule
from moevolve.workers.families.base import CORRECTION_BIAS, OUTPUT_NORM, ExpertFamily

if TYPE_CHECKING:
    from torch import nn
    from transformers import PretrainedConfig

# Softmax over all experts, then the top-k, rescaled. The experts get float32 weights whatever the model's dtype.
MIXTRAL = ExpertFamily(
    "mixtral", "Mixtral", casts_weights=False, experts_field="num_local_experts", width_field="intermediate_size"
)
# Their configs say whether the top-k is rescaled (`norm_topk_prob`). Qwen1.5-MoE and Qwen2-MoE have a shared expert
# with a gate of its own in addition to the routed ones; it is left unchanged.
QWEN2_MOE = ExpertFamily("qwen2_moe", "Qwen1.5/2-MoE", casts_weights=True)
QWEN3_MOE = ExpertFamily("qwen3_moe", "Qwen3-MoE", casts_weights=True)
# These have linear attention, whose state passes from a sequence of a row to the next. Qwen3.5 always rescales.
QWEN3_NEXT = ExpertFamily("qwen3_next", "Qwen3-Next", casts_weights=True, packs=False)
QWEN3_5_MOE = ExpertFamily("qwen3_5_moe_text", "Qwen3.5-MoE", casts_weights=True, packs=False)
OLMOE = ExpertFamily("olmoe", "OLMoE", casts_weights=True, width_field="intermediate_size")

FLEX_OLMO = ExpertFamily(
    "flex_olmo",
    "FlexOlmo",
    casts_weights=True,
    width_field="intermediate_size",
    unrepairable=lambda config: OUTPUT_NORM,
)


def gpt_oss_rule(router: nn.Module, config: PretrainedConfig) -> RoutingRule:
    """Routing rule of GPT-OSS: the top-k of the logits, and the softmax of those."""
    return RoutingRule(renormalise=True, scores="softmax_of_chosen")


def _set_experts_per_token(config: PretrainedConfig, rule: RoutingRule, active: int) -> None:
    if hasattr(config, "experts_per_token"):  # published configs have k under both names
        config.experts_per_token = active


GPT_OSS = ExpertFamily(
    "gpt_oss",
    "GPT-OSS",
    casts_weights=True,
    rule=gpt_oss_rule,
    experts_field="num_local_experts",
    width_field="intermediate_size",
    router="router",
    # Shapes [n, H, 2I] (gate and up rows alternate), [n, 2I], [n, I, H] and [n, H].
    tensors=("gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias"),
    sdpa=False,
    packs=False,  # it builds attention masks without position ids
    resize_extras=_set_experts_per_token,
)


def gemma4_rule(router: nn.Module, config: PretrainedConfig) -> RoutingRule:
    """Routing rule of Gemma-4: the top-k of the logits, and the softmax of those.

    Raises:
        UserError: Layers share keys and values, or get vectors of their own per token, so none runs on hidden states
            alone.
    """
    if config.num_kv_shared_layers or config.hidden_size_per_layer_input:
        raise UserError(
            "a gemma4 model with experts whose layers share keys and values (num_kv_shared_layers) or have embeddings "
            "of their own (hidden_size_per_layer_input) isn't supported"
        )
    # The softmax over all experts, rescaled, is that of the chosen ones.
    return RoutingRule(renormalise=True, scores="softmax_of_chosen")


# Experts and a dense network side by side, which get differently normalised inputs.
GEMMA4 = ExpertFamily(
    "gemma4_text",
    "Gemma-4",
    casts_weights=False,
    rule=gemma4_rule,
    block="",
    active_field="top_k_experts",
    router="router",
    weight="proj.weight",
    experts_input="pre_feedforward_layernorm_2",
    prepare=lambda router, hidden: router.norm(hidden) * router.scale * router.scalar_root_size,
    factors="per_expert_scale",
    other_tensors=("scale",),
    gives_probabilities=True,
    unrepairable=lambda config: OUTPUT_NORM,
)


def phimoe_rule(router: nn.Module, config: PretrainedConfig) -> RoutingRule:
    """Routing rule of Phi-3.5-MoE: two experts one after the other, each weighted among those near it.

    Raises:
        UserError: A token is to have another number of experts, which `transformers` doesn't compute.
    """
    if config.num_experts_per_tok != 2:
        raise UserError("a phimoe model with num_experts_per_tok other than 2 can't run: its routers always choose two")
    return RoutingRule(renormalise=False, scores="sparse_mixer", nearness=2 * float(config.router_jitter_noise))


PHIMOE = ExpertFamily(
    "phimoe",
    "Phi-3.5-MoE",
    casts_weights=True,
    rule=phimoe_rule,
    experts_field="num_local_experts",
    width_field="intermediate_size",
    router="router",
    stored_router="gate",
)


def cohere2_moe_rule(router: nn.Module, config: PretrainedConfig) -> RoutingRule:
    """Routing rule of Cohere2-MoE: the top-k of the logits, weighted by their softmax or by sigmoids.

    Raises:
        UserError: Shared experts are averaged with the others, which halves what a repair fits.
    """
    if config.num_shared_experts and config.shared_expert_combination_strategy != "sum":
        raise UserError("a cohere2_moe model that averages shared and routed experts isn't supported; only sums are")
    if config.expert_selection_fn == "sigmoid":
        return RoutingRule(renormalise=bool(config.norm_topk_prob), scores="sigmoid")
    # The softmax over the chosen ones is the softmax over all of them, rescaled.
    return RoutingRule(renormalise=True)


COHERE2_MOE = ExpertFamily(
    "cohere2_moe", "Cohere2-MoE", casts_weights=True, rule=cohere2_moe_rule, width_field="intermediate_size"
)


def unscaled_rule(router: nn.Module, config: PretrainedConfig) -> RoutingRule:
    """Routing rule of Jamba: softmax over all experts, and the top-k as it is."""
    return RoutingRule(renormalise=False)


def hunyuan_rule(router: nn.Module, config: PretrainedConfig) -> RoutingRule:
    """Routing rule of Hunyuan-MoE: softmax over all experts, then the top-k, rescaled.

    Raises:
        UserError: Layers differ in their numbers of experts or of active ones.
    """
    if not (isinstance(config.num_experts, int) and isinstance(config.moe_topk, int)):
        raise UserError("a hunyuan_v1_moe model whose layers have different numbers of experts isn't supported")
    return RoutingRule(renormalise=True)


MELLUM = ExpertFamily("mellum", "Mellum", casts_weights=True)
JAMBA = ExpertFamily(
    "jamba",
    "Jamba",
    casts_weights=True,
    rule=unscaled_rule,
    width_field="intermediate_size",
    block="feed_forward",
    router="router",
    packs=False,
)


def _granite(model_type: str, title: str, **differing: Any) -> ExpertFamily:
    # The softmax over the chosen ones is the softmax over all of them, rescaled.
    return ExpertFamily(
        model_type,
        title,
        casts_weights=True,
        experts_field="num_local_experts",
        width_field="intermediate_size",
        block="block_sparse_moe",
        router="router",
        output_scale=lambda config: float(config.residual_multiplier),
        **differing,
    )


_GRANITE_NAMES: dict[str, Any] = {
    "stored": (".block_sparse_moe.input_linear.weight", ".block_sparse_moe.output_linear.weight"),
    "stored_weight": "layer.weight",
}
GRANITE = (
    _granite("granitemoe", "Granite-MoE", **_GRANITE_NAMES),
    _granite("granitemoeshared", "Granite-MoE with shared experts", **_GRANITE_NAMES),
    _granite("granitemoehybrid", "Granite 4", packs=False, **_GRANITE_NAMES),
    _granite("granitemoe_swa", "Granite Swash", sdpa=False),
)


def ernie_rule(router: nn.Module, config: PretrainedConfig) -> RoutingRule:
    """Routing rule of ERNIE-4.5: softmax over all experts, chosen with a correction bias, rescaled."""
    return RoutingRule(renormalise=True, corrected=True)


ERNIE = ExpertFamily(
    "ernie4_5_moe",
    "ERNIE-4.5",
    casts_weights=True,
    rule=ernie_rule,
    experts_field="moe_num_experts",
    correction=f"moe_statics.{CORRECTION_BIAS}",  # a parameter [1, n]
    float32_router=True,
)
HUNYUAN = ExpertFamily(
    "hunyuan_v1_moe",
    "Hunyuan-MoE",
    casts_weights=True,
    rule=hunyuan_rule,
    width_field="intermediate_size",
    weight="wg.weight",
)
