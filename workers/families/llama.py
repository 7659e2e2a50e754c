"""Llama, and the dense models that are built like it: gated networks `down(act(gate(x)) * up(x))` in `mlp`.

Qwen2 has biases on the projections of its heads, which a Mixtral has not. Qwen3 normalises queries and keys before
rotary embedding, so dimensions of its heads can't be masked.
"""

from __future__ import annotations

from functools import partial

from moevolve.workers.families.base import DenseFamily

_gated = partial(DenseFamily, up="up_proj", gate="gate_proj", down="down_proj", activation="act_fn")

LLAMA = _gated("llama", "Llama", masks_heads=True, becomes_mixtral=True)
MISTRAL = _gated("mistral", "Mistral", masks_heads=True, becomes_mixtral=True)
QWEN2 = _gated("qwen2", "Qwen2", masks_heads=True)
QWEN3 = _gated("qwen3", "Qwen3")
