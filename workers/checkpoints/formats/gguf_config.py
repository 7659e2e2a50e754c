"""Derives a model's config from the metadata of a GGUF file, for files that come without a config.json."""

from __future__ import annotations

import copy
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from moevolve.evaluators.errors import UserError
from moevolve.workers.checkpoints.formats.gguf import metadata, open_parts

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_FIELDS = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "expert_used_count": "num_experts_per_tok",
}
_QWEN = {
    "attention.key_length": "head_dim",
    "expert_count": "num_experts",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}
_NARROW = {"feed_forward_length": "intermediate_size"}
# Model type, further fields by key, and what llama.cpp's code does without a key for it, by architecture.
_ARCHITECTURES: dict[str, tuple[str, dict[str, str], dict[str, Any]]] = {
    "llama": ("mixtral", _NARROW | {"expert_count": "num_local_experts", "attention.key_length": "head_dim"}, {}),
    "olmoe": ("olmoe", _NARROW | {"expert_count": "num_experts"}, {"norm_topk_prob": False}),
    "qwen2moe": ("qwen2_moe", _QWEN, {"norm_topk_prob": False}),
    "qwen3moe": ("qwen3_moe", _QWEN, {"norm_topk_prob": True}),
}

# The same of architectures whose files without a number of experts are dense models of another type.
_DENSE: dict[str, tuple[str, dict[str, str], dict[str, Any]]] = {
    "llama": ("llama", _NARROW | {"attention.key_length": "head_dim"}, {})
}


def gguf_config(file: Path) -> PretrainedConfig:
    """Derive the config of a model from the metadata of its file, the first part of a split one.

    Raises:
        UserError: The file is invalid, or of an architecture or with a rotary scaling that metadata don't describe
            completely.
    """
    # Reading the vocabulary takes seconds, and a launch asks for the config several times.
    return copy.deepcopy(_derived(file, file.stat().st_mtime_ns))


@lru_cache(maxsize=8)
def _derived(file: Path, _changed: int) -> PretrainedConfig:
    from transformers import AutoConfig

    readers = list(open_parts(file).values())
    reader = readers[0]
    architecture = str(metadata(reader, "general.architecture"))
    beside = f"put the config.json of the model that it was made from next to it, in {file.parent}"
    if architecture not in _ARCHITECTURES:
        raise UserError(f"{file}: the config of architecture {architecture!r} can't be derived from it; {beside}")
    scaling = metadata(reader, f"{architecture}.rope.scaling.type")
    if scaling not in (None, "none"):
        raise UserError(f"{file}: its rotary scaling {scaling!r} can't be derived from it; {beside}")
    dense = architecture in _DENSE and not metadata(reader, f"{architecture}.expert_count")
    model_type, keys, settings = (_DENSE if dense else _ARCHITECTURES)[architecture]
    for key, name in (_FIELDS | keys).items():
        value = metadata(reader, f"{architecture}.{key}")
        if value is not None:
            settings = settings | {name: _shortest(value)}
    theta = _shortest(metadata(reader, f"{architecture}.rope.freq_base") or 10_000.0)
    tokens = reader.get_field("tokenizer.ggml.tokens")
    return AutoConfig.for_model(
        model_type,
        **settings,
        rope_parameters={"rope_type": "default", "rope_theta": theta},
        vocab_size=0 if tokens is None else len(tokens.data),
        # llama.cpp writes the output projection only if it isn't the embedding's matrix.
        tie_word_embeddings=not any(tensor.name == "output.weight" for each in readers for tensor in each.tensors),
        **{f"{name}_token_id": metadata(reader, f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos")},
        pad_token_id=metadata(reader, "tokenizer.ggml.padding_token_id"),
    )


def _shortest(value: Any) -> Any:
    """The shortest decimal that is the same float32: 1e-5 and not 9.99999975e-06."""
    return float(str(np.float32(value))) if isinstance(value, float) else value
