"""Families without routing groups: with a softmax, as Mixtral, Qwen's, OLMoE and GPT-OSS, and with sigmoids."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from moevolve.evaluators.errors import UserError
from moevolve.kernels.routing_rule import RoutingRule
from moevolve.workers.families.base import CORRECTION_BIAS, OUTPUT_NORM, STREAMS, ExpertFamily, routing

if TYPE_CHECKING:
    from torch import nn
    from transformers import PretrainedConfig


def _set_experts_per_token(config: PretrainedConfig, rule: RoutingRule, active: int) -> None:
    if hasattr(config, "experts_per_token"):  # published configs have k under both names
        config.experts_per_token = active


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


def phimoe_rule(router: nn.Module, config: PretrainedConfig) -> RoutingRule:
    """Routing rule of Phi-3.5-MoE: two experts one after the other, each weighted among those near it.

    Raises:
        UserError: A token is to have another number of experts, which `transformers` doesn't compute.
    """
    if config.num_experts_per_tok != 2:
        raise UserError("a phimoe model with num_experts_per_tok other than 2 can't run: its routers always choose two")
    return RoutingRule(renormalise=False, scores="sparse_mixer", nearness=2 * float(config.router_jitter_noise))


def cohere2_moe_rule(router: nn.Module, config: PretrainedConfig) -> RoutingRule:
    """Routing rule of Cohere2-MoE: the top-k of the logits, weighted by their softmax or by sigmoids.

    Raises:
        UserError: Shared experts are averaged with the others, which halves what a repair fits.
    """
    if config.num_shared_experts and config.shared_expert_combination_strategy != "sum":
        raise UserError("a cohere2_moe model that averages shared and routed experts isn't supported; only sums are")
    if config.expert_selection_fn == "sigmoid":
        return RoutingRule(renormalise=bool(config.norm_topk_prob), scores="sigmoid", rounds=True)
    # The softmax over the chosen ones is the softmax over all of them, rescaled.
    return RoutingRule(renormalise=True)


def hunyuan_rule(router: nn.Module, config: PretrainedConfig) -> RoutingRule:
    """Routing rule of Hunyuan-MoE: softmax over all experts, then the top-k, rescaled.

    Raises:
        UserError: Layers differ in their numbers of experts or of active ones.
    """
    if not (isinstance(config.num_experts, int) and isinstance(config.moe_topk, int)):
        raise UserError("a hunyuan_v1_moe model whose layers have different numbers of experts isn't supported")
    return RoutingRule(renormalise=True)


def laguna_rule(router: nn.Module, config: PretrainedConfig) -> RoutingRule:
    """Routing rule of Laguna: sigmoids with a correction bias, rescaled.

    Raises:
        UserError: Logits are capped, so a mapping of logits isn't one of router rows.
    """
    if config.moe_router_logit_softcapping:
        raise UserError("a laguna model that caps its router's logits (moe_router_logit_softcapping) isn't supported")
    return RoutingRule(renormalise=True, scores="sigmoid")


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


_GRANITE_NAMES = {
    "stored": (".block_sparse_moe.input_linear.weight", ".block_sparse_moe.output_linear.weight"),
    "stored_weight": "layer.weight",
}

SOFTMAX = (
    # Softmax over all experts, then the top-k, rescaled. The experts get float32 weights whatever the model's dtype.
    ExpertFamily(
        "mixtral", "Mixtral", casts_weights=False, experts_field="num_local_experts", width_field="intermediate_size"
    ),
    # Their configs say whether the top-k is rescaled (`norm_topk_prob`). Qwen1.5-MoE and Qwen2-MoE have a shared expert
    # with a gate of its own in addition to the routed ones; it is left unchanged.
    ExpertFamily("qwen2_moe", "Qwen1.5/2-MoE", casts_weights=True),
    ExpertFamily("qwen3_moe", "Qwen3-MoE", casts_weights=True),
    # These have linear attention, whose state passes from a sequence of a row to the next. Qwen3.5 always rescales.
    ExpertFamily("qwen3_next", "Qwen3-Next", casts_weights=True, packs=False),
    ExpertFamily("qwen3_5_moe_text", "Qwen3.5-MoE", casts_weights=True, packs=False),
    ExpertFamily(
        "qwen4_exp_text",
        "Qwen4-Exp",
        casts_weights=True,
        packs=False,
        pads_left=False,  # an indexer averages blocks of keys by their place in a row
        unrepairable=lambda config: STREAMS,
    ),
    ExpertFamily("olmoe", "OLMoE", casts_weights=True, width_field="intermediate_size"),
    ExpertFamily(
        "flex_olmo",
        "FlexOlmo",
        casts_weights=True,
        width_field="intermediate_size",
        unrepairable=lambda config: OUTPUT_NORM,
    ),
    ExpertFamily(
        "cohere2_moe", "Cohere2-MoE", casts_weights=True, rule=cohere2_moe_rule, width_field="intermediate_size"
    ),
    ExpertFamily("mellum", "Mellum", casts_weights=True),
    # Experts and a dense network side by side, which get differently normalised inputs.
    ExpertFamily(
        "gemma4_text",
        "Gemma-4",
        casts_weights=False,
        rule=gemma4_rule,
        block="",
        active_field="top_k_experts",
        router="router",
        weight="proj.weight",
        experts_input=("pre_feedforward_layernorm_2",),
        prepare=lambda router, hidden: router.norm(hidden) * router.scale * router.scalar_root_size,
        factors="per_expert_scale",
        other_tensors=("scale",),
        gives_probabilities=True,
        unrepairable=lambda config: OUTPUT_NORM,
    ),
    ExpertFamily(
        "jamba",
        "Jamba",
        casts_weights=True,
        rule=routing(renormalise=False),
        width_field="intermediate_size",
        block="feed_forward",
        router="router",
        packs=False,
    ),
    _granite("granitemoe", "Granite-MoE", **_GRANITE_NAMES),
    _granite("granitemoeshared", "Granite-MoE with shared experts", **_GRANITE_NAMES),
    _granite("granitemoehybrid", "Granite 4", packs=False, **_GRANITE_NAMES),
    _granite("granitemoe_swa", "Granite Swash", sdpa=False),
    ExpertFamily(
        "ernie4_5_moe",
        "ERNIE-4.5",
        casts_weights=True,
        rule=routing(renormalise=True, corrected=True),
        experts_field="moe_num_experts",
        correction=f"moe_statics.{CORRECTION_BIAS}",  # a parameter [1, n]
        float32_router=True,
    ),
    ExpertFamily(
        "hunyuan_v1_moe",
        "Hunyuan-MoE",
        casts_weights=False,
        float32_router=True,
        rule=hunyuan_rule,
        width_field="intermediate_size",
        weight="wg.weight",
    ),
    ExpertFamily(
        "phimoe",
        "Phi-3.5-MoE",
        casts_weights=True,
        rule=phimoe_rule,
        experts_field="num_local_experts",
        width_field="intermediate_size",
        router="router",
        stored_router="gate",
    ),
    ExpertFamily(
        "gpt_oss",
        "GPT-OSS",
        casts_weights=True,
        rule=routing(renormalise=True, scores="softmax_of_chosen"),
        experts_field="num_local_experts",
        width_field="intermediate_size",
        router="router",
        # Shapes [n, H, 2I] (gate and up rows alternate), [n, 2I], [n, I, H] and [n, H].
        tensors=("gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias"),
        sdpa=False,
        packs=False,  # it builds attention masks without position ids
        resize_extras=_set_experts_per_token,
    ),
)

# Most of them choose with a correction bias.
SIGMOID = (
    ExpertFamily(
        "minimax_m2",
        "MiniMax-M2",
        casts_weights=False,
        rule=routing(renormalise=True, scores="sigmoid"),
        experts_field="num_local_experts",
        width_field="intermediate_size",
        correction_in_block=True,
    ),
    ExpertFamily(
        "minimax_m3_vl_text",
        "MiniMax-M3",
        casts_weights=False,
        rule=routing(renormalise=True, scores="sigmoid"),
        experts_field="num_local_experts",
        width_field="intermediate_size",
        output_scale=lambda config: float(config.routed_scaling_factor),
        packs=False,
        pads_left=False,  # an indexer chooses blocks of keys by their place in a row
    ),
    ExpertFamily(
        "hy_v3",
        "Hunyuan 3",
        casts_weights=False,
        rule=routing(renormalise=True, scale="router_scaling_factor", scores="sigmoid"),
        float32_router=True,
        correction_in_block=True,
    ),
    ExpertFamily(
        "lfm2_moe",
        "LFM2-MoE",
        casts_weights=True,
        # Its 1e-6 on the divisor is neglected.
        rule=routing(scale="routed_scaling_factor", scores="sigmoid", rounds=True),
        block="feed_forward",
        correction="expert_bias",
        correction_in_block=True,
        packs=False,  # its convolutions pass over the ends of sequences
    ),
    ExpertFamily(
        "laguna",
        "Laguna",
        casts_weights=True,
        rule=laguna_rule,
        output_scale=lambda config: float(config.moe_routed_scaling_factor),
    ),
    ExpertFamily(
        "afmoe",
        "AFMoE (Trinity)",
        casts_weights=False,
        rule=routing(renormalise=True, scale="route_scale", scores="sigmoid"),
        router="router",
        weight="gate.weight",
        correction="expert_bias",
        correction_in_block=True,
        takes_sequences=True,
        packs=False,  # it builds attention masks without position ids
        unrepairable=lambda config: OUTPUT_NORM,
    ),
    ExpertFamily(
        "flint", "Flint", casts_weights=False, rule=routing(scores="sigmoid"), float32_router=True, sdpa=False
    ),
    # The top-k of the logits, whose sigmoids multiply the experts' inputs.
    ExpertFamily(
        "llama4_text",
        "Llama-4",
        casts_weights=True,
        rule=routing(renormalise=False, scores="sigmoid_of_chosen", scales_inputs=True),
        experts_field="num_local_experts",
        width_field="intermediate_size",
        block="feed_forward",
        router="router",
        packs=False,  # attention in chunks
        pads_left=False,
        transposed=True,
        adapted=True,
    ),
    ExpertFamily(
        "muse_spark_text",
        "Muse Spark",
        casts_weights=False,
        rule=routing(renormalise=True, scale="routed_scaling_factor", scores="sigmoid"),
        experts_field="num_local_experts",
        float32_router=True,
        experts_input=("pre_expert_proj", "pre_expert_norm"),
        shared_by_experts=("post_expert_norm",),
        logits_factor="output_multiplier",
        unrepairable=lambda config: OUTPUT_NORM,
    ),
    # In its files, experts and router are beside the dense networks of other layers.
    ExpertFamily(
        "step3p5",
        "Step-3.5 and 3.7",
        casts_weights=False,
        rule=routing(renormalise=True, scores="sigmoid"),
        experts_field="n_routed_experts",
        output_scale=lambda config: float(config.moe_router_scaling_factor),
        stored=tuple(f".moe.{name}_proj.weight{end}" for name in ("gate", "up", "down") for end in ("", "_scale_inv")),
        adapted=True,
    ),
    # The top-k of the logits plus a correction bias, weighted by sigmoids of the logits.
    ExpertFamily(
        "kolibri1",
        "Kolibri-1",
        casts_weights=False,
        rule=routing(scores="sigmoid_of_chosen"),
        float32_router=True,
        unrepairable=lambda config: OUTPUT_NORM,
    ),
)
