"""What a pass holds beside weights and cache, in bytes per position, counted along the code of `transformers`.

A layer's attention and its network come one after the other, so the larger of the two is what a pass needs room for.
In both the embedded tokens, what goes into the layer and its normalised form are held, too, and in the network the
residual stream behind attention.
"""

from __future__ import annotations

from typing import Any

from torch import nn

STREAMS = 4
"""States as wide as the residual stream that are held while a network runs."""

_INDEX_BYTES = 40
"""Of a pair of a token and an expert: numbers of tokens and experts, sorted, and the way back."""

_NORMED = 8
"""Bytes per value while a 16-bit state is normalised: itself and its square in float32."""


def attention_bytes(attention: Any, hidden: int, size: int) -> tuple[int, int]:
    """Most that a layer's attention holds of a position that runs, and of one that is cached.

    Queries, keys and values are held as they are made, as rotary embeddings turn them, and as they are gathered for
    packed sequences; then there are the outputs. Behind a mask, keys and values of a cache are repeated for all heads
    of the queries that share them.

    Args:
        attention: the module.
        hidden: width of the residual stream.
        size: bytes of a value.
    """
    queries, keys, values = _widths(attention)
    held = size * (3 * hidden + 3 * queries + 3 * (keys + values))
    if size < 4 and getattr(attention, "q_norm", None) is not None:
        # Norms of queries run in float32.
        held = max(held, size * (3 * hidden + queries) + _NORMED * queries)
    shared = queries > keys
    return held, size * (2 * queries if shared else 0)


def _widths(attention: Any) -> tuple[int, int, int]:
    """Of all heads' queries, keys and values."""
    if getattr(attention, "kv_lora_rank", None):
        heads, width = int(attention.num_heads), int(attention.qk_head_dim)
        return heads * width, heads * width, heads * int(attention.v_head_dim)
    queries, keys, values = (int(getattr(attention, f"{name}_proj").out_features) for name in "qkv")
    return queries, keys, values


def dense_width(layer: Any) -> int:
    """Neurons of the widest dense network in a decoder layer, a shared expert's included, routed experts' not."""
    widths = [
        max(module.out_features, module.in_features)
        for name, module in layer.named_modules()
        if isinstance(module, nn.Linear) and not any(part in name for part in ("self_attn", "gate.", "router"))
    ]
    return max(widths, default=0)


def network_bytes(hidden: int, dense: int, active: int, neurons: int, size: int) -> int:
    """Most that a layer's network holds of a token, with the streams.

    Of a dense network gates, ups and their product; of experts `expert_row_bytes`.

    Args:
        hidden: width of the residual stream.
        dense: neurons of the widest dense network.
        active: experts per token; 0 without any.
        neurons: of an expert.
        size: bytes of a value.
    """
    experts = active * expert_row_bytes(hidden, neurons, size)
    # A shared expert's output waits for that of the others.
    shared = hidden * size if active and dense else 0
    return STREAMS * hidden * size + max(experts + shared, 3 * dense * size)


def expert_row_bytes(hidden: int, neurons: int, size: int) -> int:
    """Most that a layer of experts holds of a token for each expert that it runs, by `grouped_mm`.

    That is a row of inputs all along, and then gates, ups and what is made of them, or outputs as they are, weighted,
    and back in order. Arguments are those of `network_bytes`.
    """
    return size * max(hidden + 4 * neurons, 4 * hidden) + _INDEX_BYTES
