"""The activation memory of a forward pass in bytes per position, counted from the code of `transformers`.

A layer's attention and feed-forward network run one after the other, so a pass needs memory for the larger of the two.
In addition to their own activations both hold the embedded tokens, the layer's input and its normalised form; the
network also holds the residual stream after attention.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from moevolve.workers.families.decoder import softmax_attention

# Number of hidden states of the size of the residual stream that are held while a network runs.
STREAMS = 4

# Bytes per pair of a token and a chosen expert: indices of both, sorted, and the inverse permutation.
_INDEX_BYTES = 40
# Bytes per value while a 16-bit state is normalised: the value and its square in float32.
_NORMED = 8


def mixer_bytes(layer: nn.Module, hidden: int, size: int) -> tuple[int, int]:
    """Peak activation memory of a layer's attention, or of the recurrent mixer that it has instead.

    Args:
        layer: Decoder layer.
        hidden: Size of the residual stream.
        size: Bytes per value, here and in the other functions.

    Returns:
        Bytes per position that is run, and per cached position.
    """
    attention = softmax_attention(layer)
    if attention is not None:
        return _attention_bytes(attention, hidden, size)
    # A recurrent mixer: what its linear layers give, before and after the convolution, and as float32. Not measured.
    mixers = (child for child in layer.children() if any(isinstance(each, nn.Conv1d) for each in child.modules()))
    linears = (each for mixer in mixers for each in mixer.modules() if isinstance(each, nn.Linear))
    width = sum(each.out_features for each in linears)
    return size * 3 * hidden + (2 * size + 4) * width, 0


def _attention_bytes(attention: nn.Module, hidden: int, size: int) -> tuple[int, int]:
    """Return the bytes of a layer's attention per position that is run and per cached position.

    Queries, keys and values are held as computed, after rotary embedding, and gathered for packed sequences; then come
    the outputs. With a mask, cached keys and values are repeated for all query heads that share them.
    """
    queries, keys, values = attention_widths(attention)
    held = size * (3 * hidden + 3 * queries + 3 * (keys + values))
    if size < 4 and getattr(attention, "q_norm", None) is not None:
        # Queries are normalised in float32.
        held = max(held, size * (3 * hidden + queries) + _NORMED * queries)
    return held, size * 2 * queries if queries > keys else 0


def scores_bytes(layers: Iterable[nn.Module], size: int) -> int:
    """Return the bytes that `eager` attention holds per pair of a query and a key, in the layer with the most heads.

    Scores are held with their softmax, in float32 and as cast. Layers with sinks (GPT-OSS) compute all in one dtype,
    and hold the scores, the scores and sinks less the largest, and their softmax.
    """
    attentions = [attention for layer in layers if (attention := softmax_attention(layer)) is not None]
    heads = (attention_widths(each)[0] // int(getattr(each, "qk_head_dim", 0) or each.head_dim) for each in attentions)
    sinks = any(hasattr(each, "sinks") for each in attentions)
    return max(heads, default=0) * (3 * size if sinks else 2 * size + 4)


def attention_widths(attention: Any) -> tuple[int, int, int]:
    """Return the sizes of the queries, keys and values of all heads."""
    if getattr(attention, "kv_lora_rank", None):
        heads, width = int(attention.num_heads), int(attention.qk_head_dim)
        return heads * width, heads * width, heads * int(attention.v_head_dim)
    if hasattr(attention, "kv_proj"):  # DeepSeek-V4's keys of one head are its values, too
        shared = int(attention.kv_proj.out_features)
        return int(attention.q_b_proj.out_features), shared, shared
    # Some layers of Gemma-4 use their keys as values.
    values = getattr(attention, "v_proj", None) or attention.k_proj
    return int(attention.q_proj.out_features), int(attention.k_proj.out_features), int(values.out_features)


def dense_width(layer: nn.Module) -> int:
    """Return the neurons of the widest dense network or shared expert in a decoder layer; 0 without any."""
    widths = (
        max(module.out_features, module.in_features)
        for name, module in layer.named_modules()
        if isinstance(module, nn.Linear) and not any(part in name for part in ("self_attn", "gate.", "router"))
    )
    return max(widths, default=0)


def network_bytes(hidden: int, dense: int, active: int, neurons: int, size: int) -> int:
    """Peak activation memory of a layer's feed-forward network, in bytes per token.

    Args:
        dense: Neurons of the widest dense network or shared expert.
        active: Active experts per token; 0 for a dense model.
        neurons: Neurons of an expert.
    """
    experts = active * expert_row_bytes(hidden, neurons, size)
    # A shared expert's output is held until the routed experts' outputs are there.
    shared = hidden * size if active and dense else 0
    return STREAMS * hidden * size + max(experts + shared, 3 * dense * size)


def expert_row_bytes(hidden: int, neurons: int, size: int) -> int:
    """Peak activation memory of `grouped_mm` experts, in bytes per token and active expert; see `network_bytes`."""
    # The inputs, with either gates, ups and their product, or the outputs as computed, weighted, and in order.
    return size * max(hidden + 4 * neurons, 4 * hidden) + _INDEX_BYTES
