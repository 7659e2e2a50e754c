"""The families of dense models: Llama and models built like it, OPT, and Phi."""

from __future__ import annotations

from functools import partial

from moevolve.workers.families.base import DenseFamily

# Gated networks `down(act(gate(x)) * up(x))` in `mlp`.
_llama_like = partial(DenseFamily, up="up_proj", gate="gate_proj", down="down_proj", activation="act_fn")
_ungated = partial(DenseFamily, up="fc1", gate=None, down="fc2", activation="activation_fn")

DENSE = (
    _llama_like("llama", "Llama", masks_heads=True, becomes_mixtral=True),
    _llama_like("mistral", "Mistral", masks_heads=True, becomes_mixtral=True),
    # Biases on the query, key and value projections, which a Mixtral doesn't have.
    _llama_like("qwen2", "Qwen2", masks_heads=True),
    # Normalises queries and keys before rotary embedding, so dimensions of its heads can't be masked.
    _llama_like("qwen3", "Qwen3"),
    # Networks with biases, held and run by the decoder layer itself. OPT builds attention masks without position ids.
    _ungated("opt", "OPT", inline=True, packs=False, width_field="ffn_dim"),
    # Networks with biases, in `mlp`; rotary embedding covers only a part of each head.
    _ungated("phi", "Phi"),
)
