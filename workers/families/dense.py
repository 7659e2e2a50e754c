"""The families of dense models: Llama and models built like it, and others."""

from __future__ import annotations

from functools import partial

from moevolve.workers.families.base import DenseFamily

# Gated networks `down(act(gate(x)) * up(x))` in `mlp`.
_gated = partial(DenseFamily, up="up_proj", gate="gate_proj", down="down_proj", activation="act_fn")
_ungated = partial(DenseFamily, up="fc1", gate=None, down="fc2", activation="activation_fn")
# What their networks give is normalised before it is added.
_normalised = partial(_gated, output_norm="post_feedforward_layernorm")

DENSE = (
    _gated("llama", "Llama", masks_heads=True, becomes_mixtral=True),
    _gated("mistral", "Mistral", masks_heads=True, becomes_mixtral=True),
    # Biases on the query, key and value projections, which a Mixtral doesn't have.
    _gated("qwen2", "Qwen2", masks_heads=True),
    # Normalises queries and keys before rotary embedding, so dimensions of its heads can't be masked.
    _gated("qwen3", "Qwen3"),
    _gated("qwen3_5_text", "Qwen3.5", packs=False),
    # The `sdpa` attention of transformers doesn't bound scores.
    _normalised("gemma2", "Gemma 2", sdpa=False),
    _normalised("gemma3_text", "Gemma 3"),
    _normalised("olmo2", "OLMo 2"),
    _normalised("olmo3", "OLMo 3"),
    _gated("granite", "Granite", output_scale=lambda config: float(config.residual_multiplier)),
    _gated("smollm3", "SmolLM3"),
    # Attention and network side by side, behind one norm.
    _gated("cohere2", "Cohere2"),
    _gated("phi3", "Phi-3", fused="gate_up_proj", activation="activation_fn"),
    # Networks with biases, in `mlp`.
    _ungated("starcoder2", "StarCoder2", up="c_fc", down="c_proj", activation="act"),
    # Networks with biases, held and run by the decoder layer itself. OPT builds attention masks without position ids.
    _ungated("opt", "OPT", inline=True, packs=False, width_field="ffn_dim"),
    # Networks with biases, in `mlp`; rotary embedding covers only a part of each head.
    _ungated("phi", "Phi"),
)
