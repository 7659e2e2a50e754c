"""Settings of tiny models of the families, and edits for them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from moevolve.workers.contract.fitting import FitRows
from moevolve.workers.methods.eep.edit import EepEdit

COMMON: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.25,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
MLA: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "intermediate_size": 40,
    "moe_intermediate_size": 24,
    "n_shared_experts": 1,
}
DEEPSEEK_V2 = MLA | {
    "q_lora_rank": None,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
    "n_routed_experts": 6,
}
DEEPSEEK_V3 = MLA | {
    "q_lora_rank": 10,
    "first_k_dense_replace": 1,
    "n_routed_experts": 6,
    "n_group": 1,
    "topk_group": 1,
}
GLM: dict[str, Any] = {
    "intermediate_size": 40,
    "moe_intermediate_size": 24,
    "n_routed_experts": 6,
    "first_k_dense_replace": 1,
    "head_dim": 8,
    "use_qk_norm": True,
    "routed_scaling_factor": 1.5,
}
SAMPLED: dict[str, dict[str, Any]] = {
    "deepseek_v2": DEEPSEEK_V2,
    "deepseek_v2-grouped": DEEPSEEK_V2
    | {"topk_method": "group_limited_greedy", "n_routed_experts": 8, "n_group": 4, "topk_group": 2},
    "deepseek_v3": DEEPSEEK_V3,
    "deepseek_v3-grouped": DEEPSEEK_V3 | {"n_routed_experts": 8, "n_group": 2, "topk_group": 1},
    "deepseek_v3-unscaled": DEEPSEEK_V3 | {"norm_topk_prob": False, "n_group": 3, "topk_group": 3},
    "glm4_moe": GLM,
    "gpt_oss": {
        "intermediate_size": 24,
        "num_local_experts": 6,
        "head_dim": 8,
        "sliding_window": 6,
        "swiglu_limit": 0.7,
    },
}
"""By variant: the model type, and after a dash what is special. `swiglu_limit` is low enough to cut."""

LINEAR: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 3,
}
QWEN_NEXT = LINEAR | {
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 20,
    "num_experts": 6,
    "head_dim": 8,
}
KIMI = DEEPSEEK_V3 | {"q_lora_rank": None, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.5}
NEMOTRON: dict[str, Any] = {
    "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"],
    "intermediate_size": 40,
    "moe_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 20,
    "n_routed_experts": 6,
    "head_dim": 8,
    "ssm_state_size": 8,
    "mamba_num_heads": 4,
    "mamba_head_dim": 8,
    "n_groups": 1,
    "chunk_size": 8,
    "routed_scaling_factor": 1.5,
}
DEEPSEEK_V4: dict[str, Any] = {
    "moe_intermediate_size": 24,
    "n_routed_experts": 6,
    "head_dim": 8,
    "num_key_value_heads": 1,
    "q_lora_rank": 10,
    "mlp_layer_types": ["hash_moe", "moe", "moe"],
    "layer_types": ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"],
    "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 4},
    "hc_mult": 2,
    "sliding_window": 6,
    "o_groups": 2,
    "o_lora_rank": 6,
    "index_n_heads": 2,
    "index_head_dim": 8,
    "index_topk": 64,
    "swiglu_limit": 0.7,
}
MINIMAX_M3: dict[str, Any] = {
    "intermediate_size": 24,
    "dense_intermediate_size": 40,
    "shared_intermediate_size": 20,
    "num_local_experts": 6,
    "head_dim": 8,
    "rotary_dim": 4,
    "swiglu_limit": 0.7,
    "mlp_layer_types": ["dense", "sparse", "sparse"],
    "layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"],
    "index_n_heads": 2,
    "index_head_dim": 8,
    "index_block_size": 2,
    "index_topk_blocks": 2,
}
GLM_NEXT = MLA | {
    "qk_rope_head_dim": 0,
    "head_dim": 0,
    "q_lora_rank": 10,
    "n_routed_experts": 6,
    "routed_scaling_factor": 1.5,
    "layer_types": ["linear_attention", "indexed_attention", "linear_attention"],
    "mlp_layer_types": ["dense", "sparse", "sparse"],
    "linear_head_dim": 8,
    "linear_num_heads": 4,
    "linear_conv_kernel_dim": 3,
    "index_n_heads": 2,
    "index_head_dim": 8,
    "index_topk": 64,
    "index_kpool": 2,
    "hc_mult": 2,
    "swiglu_limit": 0.7,
}
STEP: dict[str, Any] = {
    "intermediate_size": 40,
    "moe_intermediate_size": 24,
    "share_expert_dim": 24,
    "n_routed_experts": 6,
    "head_dim": 8,
    "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    "sliding_window": 4,
    "num_sliding_attention_heads": 2,
    "mlp_layer_types": ["dense", "sparse", "sparse"],
    "moe_router_scaling_factor": 1.5,
    "swiglu_limits": [0.0, 0.0, 0.7],
    "swiglu_limits_shared": [0.0, 0.5, 0.0],
}
MUSE: dict[str, Any] = {
    "intermediate_size": 40,
    "moe_intermediate_size": 24,
    "moe_hidden_size": 16,
    "num_local_experts": 6,
    "head_dim": 8,
    "mlp_layer_types": ["dense", "sparse", "sparse"],
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "sliding_window": 4,
    "routed_scaling_factor": 1.5,
    "output_multiplier": 0.7,
    "final_logit_softcapping": 5.0,
}
MISTRAL_LARGE: dict[str, Any] = MLA | {
    "n_routed_experts": 6,
    "index_n_heads": 2,
    "index_head_dim": 8,
    "index_topk": 64,
    "no_rope_layers": [1, 1, 0],
    "kv_source_layers": [0, 0, 2],
    "indexer_types": ["full", "full", "full"],
    "routed_scaling_factor": 1.5,
    "final_logit_softcapping": 5.0,
}
QWEN4: dict[str, Any] = {
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
    "num_experts": 6,
    "head_dim": 8,
    "layer_types": ["linear_attention", "indexed_attention", "linear_attention"],
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_conv_kernel_dim": 3,
    "hc_count": 2,
    "hc_lowrank": 6,
    "ple_layer_ids": [1, 3],
    "ple_embed_dim": 16,
    "heads_per_ngram": 2,
    "ngram_vocab_size_base": 40,
    "make_ngram_vocab_size_divisible_by": 4,
    "split_ngram_parts": 2,
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 8,
    "indexer_budget": 64,
    "indexer_compress_ratio": 2,
}
LLAMA4: dict[str, Any] = {
    "intermediate_size": 24,
    "intermediate_size_mlp": 40,
    "num_local_experts": 6,
    "head_dim": 8,
    "interleave_moe_layer_step": 1,
    "moe_layers": [0, 2],
    "no_rope_layer_interval": 2,
    "attention_chunk_size": 4,
    "floor_scale": 2,
}
NARROW: dict[str, Any] = {"intermediate_size": 40, "moe_intermediate_size": 24, "num_experts": 6, "head_dim": 8}
RECENT: dict[str, dict[str, Any]] = {
    "qwen3_next": QWEN_NEXT | {"intermediate_size": 40, "norm_topk_prob": True},
    "qwen3_5_moe_text": QWEN_NEXT,
    "cohere2_moe": {
        "intermediate_size": 24,
        "num_experts": 6,
        "head_dim": 8,
        "sliding_window": 6,
        "expert_selection_fn": "sigmoid",
        "num_shared_experts": 1,
        "shared_expert_combination_strategy": "sum",
        "logit_scale": 1.0,
    },
    "cohere2_moe-softmax": {"intermediate_size": 24, "num_experts": 6, "head_dim": 8, "logit_scale": 0.5},
    "minimax_m2": {"intermediate_size": 24, "num_local_experts": 6, "head_dim": 8, "rotary_dim": 4},
    # A small `index_topk` would leave its choice to ties, which `transformers` breaks by a token's place in a batch.
    "deepseek_v32": DEEPSEEK_V3
    | {"routed_scaling_factor": 1.5, "index_n_heads": 2, "index_head_dim": 8, "index_topk": 64},
    "glm_moe_dsa": DEEPSEEK_V3
    | {
        "routed_scaling_factor": 1.5,
        "index_n_heads": 2,
        "index_head_dim": 8,
        "index_topk": 64,
    },
    "glm_moe_dsa-shared": DEEPSEEK_V3
    | {"index_n_heads": 2, "index_head_dim": 8, "index_topk": 64, "indexer_types": ["full", "shared", "full"]},
    "glm4_moe_lite": DEEPSEEK_V3 | {"routed_scaling_factor": 1.5},
    "dots1": GLM | {"n_shared_experts": 1, "n_group": 1, "topk_group": 1},
    "solar_open": GLM | {"n_shared_experts": 1, "n_group": 1, "topk_group": 1},
    "exaone_moe": {
        "intermediate_size": 40,
        "moe_intermediate_size": 24,
        "num_experts": 6,
        "num_shared_experts": 1,
        "first_k_dense_replace": 1,
        "head_dim": 8,
        "n_group": 2,
        "topk_group": 1,
        "sliding_window": 6,
        "routed_scaling_factor": 1.5,
    },
    "mimo_v2_flash": {
        "intermediate_size": 40,
        "moe_intermediate_size": 24,
        "n_routed_experts": 6,
        "head_dim": 8,
        "v_head_dim": 8,
        "sliding_window": 6,
    },
    "mellum": NARROW | {"mlp_layer_types": ["dense", "sparse", "sparse"]},
    "hy_v3": NARROW,
    "laguna": NARROW | {"shared_expert_intermediate_size": 20, "moe_routed_scaling_factor": 1.5},
    "granitemoe": {
        "intermediate_size": 24,
        "num_local_experts": 6,
        "residual_multiplier": 0.6,
        "logits_scaling": 4.0,
    },
    "granitemoeshared": {
        "intermediate_size": 24,
        "num_local_experts": 6,
        "shared_intermediate_size": 20,
        "residual_multiplier": 0.6,
    },
    "granitemoehybrid": {
        "intermediate_size": 24,
        "num_local_experts": 6,
        "shared_intermediate_size": 20,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "mamba_n_heads": 4,
        "mamba_d_state": 8,
        "mamba_chunk_size": 8,
    },
    "jamba": {
        "intermediate_size": 24,
        "num_experts": 6,
        "expert_layer_period": 1,
        "expert_layer_offset": 0,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "mamba_d_state": 4,
        "use_mamba_kernels": False,
    },
    "lfm2_moe": {
        "intermediate_size": 40,
        "moe_intermediate_size": 24,
        "num_experts": 6,
        "num_dense_layers": 1,
        "layer_types": ["conv", "full_attention", "conv"],
        "routed_scaling_factor": 1.5,
    },
    "ernie4_5_moe": {
        "intermediate_size": 40,
        "moe_intermediate_size": 24,
        "moe_num_experts": 6,
        "moe_layer_start_index": 1,
        "moe_layer_end_index": 2,
        "moe_num_shared_experts": 1,
        "head_dim": 8,
    },
    "hunyuan_v1_moe": {"intermediate_size": 24, "num_experts": 6, "head_dim": 8},
    # Noise that makes some logits near others.
    "phimoe": {
        "intermediate_size": 24,
        "num_local_experts": 6,
        "attention_bias": True,
        "lm_head_bias": True,
        "router_jitter_noise": 0.3,
    },
    "flex_olmo": {"intermediate_size": 24, "num_experts": 6, "norm_topk_prob": True},
    "axk1": DEEPSEEK_V3 | {"routed_scaling_factor": 1.5},
    "axk2": DEEPSEEK_V3
    | {"routed_scaling_factor": 1.5, "index_n_heads": 2, "index_head_dim": 8, "index_topk": 64, "gated_norm_rank": 4}
    | {"n_group": None, "topk_group": None},
    "beam": NARROW
    | {"n_group": 2, "topk_group": 1, "routed_scaling_factor": 1.5, "sliding_window": 6}
    | {"mlp_layer_types": ["dense", "sparse", "sparse"]},
    "hy_v4": DEEPSEEK_V3
    | {"routed_scaling_factor": 1.5, "index_n_heads": 2, "index_head_dim": 8, "index_topk": 64, "hc_mult": 2}
    | {"swiglu_limit": 10.0, "indexer_types": ["full", "shared", "full"]},
    "flint": NARROW | {"shared_expert_intermediate_size": 20, "sliding_window": 6, "mlp_only_layers": [0]},
    "granitemoe_swa": {"intermediate_size": 24, "num_local_experts": 6, "sliding_window": 6}
    | {"shared_intermediate_size": 20, "residual_multiplier": 0.6},
    "afmoe": {
        "intermediate_size": 40,
        "moe_intermediate_size": 24,
        "num_experts": 6,
        "num_shared_experts": 1,
        "head_dim": 8,
        "sliding_window": 6,
        "global_attn_every_n_layers": 2,
        "route_scale": 1.5,
    },
    "kolibri1": {"moe_intermediate_size": 24, "num_experts": 6, "head_dim": 8, "sliding_window": 6}
    | {"shared_expert_intermediate_size": 20},
    "gemma4_text": {
        "intermediate_size": 40,
        "moe_intermediate_size": 24,
        "num_experts": 6,
        "top_k_experts": 2,
        "enable_moe_block": True,
        "head_dim": 8,
        "global_head_dim": 16,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "hidden_size_per_layer_input": 0,
        "sliding_window": 6,
        "final_logit_softcapping": 5.0,
    },
    "deepseek_v4": DEEPSEEK_V4,
    "minimax_m3_vl_text": MINIMAX_M3,
    "llama4_text": LLAMA4,
    "glm5_next_text": GLM_NEXT,
    "step3p5": STEP,
    "qwen4_exp_text": QWEN4,
    "muse_spark_text": MUSE,
    "mistral_large4_text": MISTRAL_LARGE,
    "mistral4": DEEPSEEK_V3 | {"n_group": 2, "topk_group": 1, "routed_scaling_factor": 1.5},
    "nemotron_h": NEMOTRON,
    "nemotron_h-latent": NEMOTRON | {"moe_latent_size": 16},
    "kimi_linear": KIMI
    | {
        "num_local_experts": 6,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "linear_head_dim": 8,
        "linear_num_heads": 4,
        "linear_conv_kernel_dim": 3,
    },
    "bailing_hybrid": KIMI
    | {"num_local_experts": 6, "head_dim": 8, "layer_group_size": 2, "short_conv_kernel_size": 3},
}
"""Further families, whose blocks are like those above, or like Qwen's."""

SETTINGS = SAMPLED | RECENT
UNREPAIRABLE = (
    "flex_olmo",
    "axk1",
    "beam",
    "hy_v4",
    "deepseek_v4",
    "glm5_next_text",
    "qwen4_exp_text",
    "muse_spark_text",
    "mistral_large4_text",
    "glm_moe_dsa-shared",
    "afmoe",
    "kolibri1",
    "gemma4_text",
    "nemotron_h-latent",
)
"""Families whose layers' outputs aren't linear in the experts' output projections, or in those alone."""


def representatives(first: Iterable[str], all_of: Iterable[str]) -> list[Any]:
    """Families or formats in the order of their names, those that aren't among the first marked `family_matrix`."""
    chosen = sorted(first)
    others = [pytest.param(each, marks=pytest.mark.family_matrix) for each in sorted(all_of) if each not in chosen]
    return [*chosen, *others]


@dataclass(frozen=True)
class Sample:
    """What a variant's model has, said once more by hand."""

    model_type: str
    experts: int
    moe_layers: tuple[int, ...]
    expert_parameters: int
    router_parameters: int
    rescales: bool
    folds: bool


_EXPERT = 3 * 24 * 32
SAMPLES = {
    "mixtral": Sample("mixtral", 6, (0, 1, 2), _EXPERT, 32, rescales=True, folds=True),
    "qwen2_moe": Sample("qwen2_moe", 6, (0, 2), _EXPERT, 32, rescales=False, folds=False),
    "deepseek_v2": Sample("deepseek_v2", 6, (1, 2), _EXPERT, 32, rescales=False, folds=False),
    "deepseek_v2-grouped": Sample("deepseek_v2", 8, (1, 2), _EXPERT, 32, rescales=False, folds=False),
    "deepseek_v3": Sample("deepseek_v3", 6, (1, 2), _EXPERT, 32, rescales=True, folds=True),
    "deepseek_v3-grouped": Sample("deepseek_v3", 8, (1, 2), _EXPERT, 32, rescales=True, folds=True),
    "deepseek_v3-unscaled": Sample("deepseek_v3", 6, (1, 2), _EXPERT, 32, rescales=False, folds=True),
    "glm4_moe": Sample("glm4_moe", 6, (1, 2), _EXPERT, 32, rescales=True, folds=True),
    "gpt_oss": Sample("gpt_oss", 6, (0, 1, 2), _EXPERT + 2 * 24 + 32, 33, rescales=True, folds=True),
}


def randomise(name: str, tensor: Tensor) -> None:
    """Give what starts at zero or is tiny in these families a part to play."""
    if name.endswith(("per_expert_scale", ".router.scale")):
        nn.init.normal_(tensor, mean=1.0, std=0.25)
    elif name.endswith((".gate.weight", ".router.weight", ".wg.weight", ".router.proj.weight")):
        nn.init.normal_(tensor, std=0.4)
    elif name.endswith(("e_score_correction_bias", "expert_bias", "router.bias", "proj_bias", ".sinks")):
        nn.init.normal_(tensor, std=0.25)
    elif name.endswith("tid2eid"):
        tensor.copy_(torch.stack([torch.randperm(6)[: tensor.shape[1]] for _ in tensor]))


def sample_rows(seed: int = 0, lengths: tuple[int, ...] = (9, 14, 11, 9, 20)) -> FitRows:
    """Random token sequences of the small vocabulary."""
    tokens = np.random.default_rng(seed).integers(3, 97, sum(lengths), dtype=np.int32)
    return FitRows(tokens, np.array(lengths, dtype=np.int32), np.array(lengths, dtype=np.int32))


def one_hot(layers: int, retained: int, experts: int, rng: np.random.Generator) -> NDArray[np.float32]:
    return np.eye(experts, dtype=np.float32)[np.stack([rng.permutation(experts)[:retained] for _ in range(layers)])]


def edit_of_kind(
    layers: int, experts: int, kind: str, retained: int = 4, active: int = 2, space: str = "probs", seed: int = 0
) -> EepEdit:
    """Edits by kind: `prune`, `crossed` (two different one-hot matrices), `mapped`, `merged`, `both`, `mixed`."""
    rng = np.random.default_rng(seed)
    mapping = one_hot(layers, retained, experts, rng)
    merging = one_hot(layers, retained, experts, rng) if kind == "crossed" else mapping.copy()
    noise = rng.normal(0, 0.15, (2, *mapping.shape)).astype(np.float32)
    if kind in ("mapped", "both", "mixed"):
        mapping = mapping + noise[0]
    if kind in ("merged", "both", "mixed"):
        merging = merging + noise[1] * (rng.random(merging.shape) < 0.6)
    if kind == "mixed":
        mapping[0] = merging[0] = one_hot(1, retained, experts, rng)[0]
        merging[-1] = one_hot(1, retained, experts, rng)[0]
    return EepEdit(mapping, merging, active, space)  # type: ignore[arg-type]


def make_family_edit(
    variant: str, kind: str, retained: int = 4, active: int = 2, space: str = "probs", seed: int = 0
) -> EepEdit:
    """See `edit_of_kind`."""
    sample = SAMPLES[variant]
    return edit_of_kind(len(sample.moe_layers), sample.experts, kind, retained, active, space, seed)
