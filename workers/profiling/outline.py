"""Predicts the bytes of a model's weights, cache and activations from its config alone."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import nn

from moevolve.evaluators.errors import opening
from moevolve.workers.checkpoints.loading import check_weights
from moevolve.workers.contract.facts import ModelFacts
from moevolve.workers.contract.settings import ModelConfig
from moevolve.workers.engine.tokenizing import context_of
from moevolve.workers.families.base import CORRECTION_BIAS
from moevolve.workers.families.decoder import decoder_of, softmax_attention
from moevolve.workers.families.layers import find_moe_layers, linears_outside
from moevolve.workers.model.describe import describe_config, meta_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Number of hidden states of the size of the residual stream that are held while a network runs: the embedded tokens,
# the layer's input, the stream after attention, and its normalised form.
_STREAMS = 4
# Bytes per pair of a token and a chosen expert: indices of both, sorted, and the inverse permutation.
_INDEX_BYTES = 40


@dataclass(frozen=True, slots=True)
class ModelOutline:
    """Sizes of a model, without its weights.

    Attributes:
        weight_bytes: Bytes of parameters and buffers as a worker loads them.
        expert_bytes: Bytes of every fused expert tensor, for each MoE layer.
        linear_bytes: Bytes of the weight of every linear layer outside of experts and routers, for each decoder layer.
        row_bytes: Peak activation memory of routed experts, in bytes per token and active expert.
        cache_bytes: Bytes of the KV cache per position, over all layers.
        layer_bytes: Peak activation memory of a decoder layer, in bytes per token: that of its attention or of its
            feed-forward network, which run one after the other, whichever is larger.
        scores_bytes: Bytes per pair of a query and a key in the same sequence, which `eager` attention holds on a GPU;
            on a CPU it runs in small blocks.
        intermediate: Neurons of an expert, or of a dense network.
    """

    facts: ModelFacts
    layers: int
    weight_bytes: int
    expert_bytes: tuple[tuple[int, ...], ...] = field(repr=False)
    linear_bytes: tuple[tuple[int, ...], ...] = field(repr=False)
    row_bytes: int
    cache_bytes: int
    layer_bytes: int
    scores_bytes: int
    hidden: int
    vocabulary: int
    intermediate: int
    positions: int

    @property
    def experts_bytes(self) -> int:
        """Bytes of the experts of all MoE layers; 0 for a dense model."""
        return sum(map(sum, self.expert_bytes))

    @property
    def pinned_bytes(self) -> int:
        """Bytes that all experts take in pinned host memory."""
        return _pinned(self.expert_bytes)

    @property
    def pinned_linear_bytes(self) -> int:
        """Bytes that all linear layers outside of experts and routers take in pinned host memory."""
        return _pinned(self.linear_bytes)


def _pinned(layers: Sequence[Sequence[int]]) -> int:
    # By default torch's `CachingHostAllocator` rounds every tensor up to a power of two.
    return sum(1 << (size - 1).bit_length() for sizes in layers for size in sizes)


def outline_model(config: ModelConfig) -> ModelOutline:
    """Outline a checkpoint from its config.json, after checking the headers of its files if they are there.

    Raises:
        UserError: The config can't be read, the files aren't those of its model, or the family isn't supported.
    """
    check_weights(config)
    with opening(f"model {config.path}: it can't be described"):
        model = meta_model(config)
        layers = decoder_of(model).layers
        facts = describe_config(model, config)
        hidden, size = int(model.config.hidden_size), facts.dtype_bytes
        intermediate = facts.dense.width if facts.dense else facts.expert_parameters // (3 * hidden)
        # Correction biases are loaded in float32, whatever the dtype.
        buffers = sum(
            (4 if name.endswith(CORRECTION_BIAS) else each.itemsize) * each.numel()
            for name, each in model.named_buffers()
        )
        mixtures = find_moe_layers(model, config.path)
        # Where a router is kept in float32, its weights and what they are multiplied with are so, too.
        weight = mixtures[0].router_weight.itemsize if mixtures else size
        expert = _expert_bytes(hidden, intermediate, size, weight) if mixtures else 0
        network = _network_bytes(hidden, max(map(_dense_width, layers)), facts.active * expert, size)
        eager = model.config._attn_implementation == "eager"
        return ModelOutline(
            facts=facts,
            layers=len(layers),
            weight_bytes=sum(each.nbytes for each in model.parameters()) + buffers,
            expert_bytes=tuple(
                tuple(tensor.nbytes for tensor in layer.expert_tensors().values()) for layer in mixtures
            ),
            linear_bytes=tuple(
                tuple(linear.weight.nbytes for linear in group) for group in linears_outside(model, mixtures)
            ),
            row_bytes=expert,
            cache_bytes=_cached_values(model) * size,
            layer_bytes=max(*(_mixer_bytes(layer, hidden, size) for layer in layers), network),
            scores_bytes=max(_scores_bytes(layer, size) for layer in layers) if eager else 0,
            hidden=hidden,
            vocabulary=int(model.get_output_embeddings().weight.shape[0]),
            intermediate=intermediate,
            positions=context_of(model.config) or sys.maxsize,
        )


def _expert_bytes(hidden: int, neurons: int, size: int, weight: int) -> int:
    """Peak activation memory of `grouped_mm` experts, in bytes per token and active expert.

    Values take `size` bytes, routing weights `weight`.
    """
    # The inputs, with either gates, ups and their product, or the outputs as computed, weighted, and in order.
    return max(size * (hidden + 4 * neurons), 2 * hidden * (size + max(size, weight))) + _INDEX_BYTES


def _network_bytes(hidden: int, dense: int, experts: int, size: int) -> int:
    """Peak activation memory of a layer's feed-forward network, in bytes per token.

    The widest dense network or shared expert has `dense` neurons; a token's routed experts take `experts` bytes. A
    shared expert's output is held until theirs are there.
    """
    routed = experts + (hidden * size if experts and dense else 0)
    return _STREAMS * hidden * size + max(routed, 3 * dense * size)


def _mixer_bytes(layer: nn.Module, hidden: int, size: int) -> int:
    """Peak activation memory of a layer's attention, or of the recurrent mixer that it has instead, per token.

    An attention holds queries, keys and values as computed, after rotary embedding, and gathered for packed sequences.
    A recurrent mixer holds what its linear layers give, before and after the convolution, and as float32; this wasn't
    measured.
    """
    attention = softmax_attention(layer)
    if attention is not None:
        return size * 3 * (hidden + sum(_attention_widths(attention)))
    mixers = (child for child in layer.children() if any(isinstance(each, nn.Conv1d) for each in child.modules()))
    linears = (each for mixer in mixers for each in mixer.modules() if isinstance(each, nn.Linear))
    return size * 3 * hidden + (2 * size + 4) * sum(each.out_features for each in linears)


def _scores_bytes(layer: nn.Module, size: int) -> int:
    """Return the bytes that `eager` attention holds per pair of a query and a key.

    Scores are held with their softmax, in float32 and as cast. Layers with sinks (GPT-OSS) compute all in one dtype,
    and hold the scores, the scores and sinks less the largest, and their softmax.
    """
    attention = softmax_attention(layer)
    if attention is None:
        return 0
    heads = _attention_widths(attention)[0] // int(getattr(attention, "qk_head_dim", 0) or attention.head_dim)
    return heads * (3 * size if hasattr(attention, "sinks") else 2 * size + 4)


def _attention_widths(attention: Any) -> tuple[int, int, int]:
    """Return the sizes of the queries, keys and values of all heads."""
    if getattr(attention, "kv_lora_rank", None):
        heads, width = int(attention.num_heads), int(attention.qk_head_dim)
        return heads * width, heads * width, heads * int(attention.v_head_dim)
    if hasattr(attention, "kv_proj"):  # DeepSeek-V4's keys of one head are its values, too
        shared = int(attention.kv_proj.out_features)
        return int(attention.q_b_proj.out_features), shared, shared
    if hasattr(attention, "qkv_proj"):  # Phi-3 computes them together
        keys = int(attention.num_key_value_heads * attention.head_dim)
        return int(attention.qkv_proj.out_features) - 2 * keys, keys, keys
    # Some layers of Gemma-4 use their keys as values.
    values = getattr(attention, "v_proj", None) or attention.k_proj
    return int(attention.q_proj.out_features), int(attention.k_proj.out_features), int(values.out_features)


def _dense_width(layer: nn.Module) -> int:
    """Return the neurons of the widest dense network or shared expert in a decoder layer; 0 without any."""
    widths = (
        max(module.out_features, module.in_features)
        for name, module in layer.named_modules()
        if isinstance(module, nn.Linear) and not any(part in name for part in ("self_attn", "gate", "router"))
    )
    return max(widths, default=0)


def _cached_values(model: PreTrainedModel) -> int:
    """Return the number of values per position in the KV cache of all layers.

    States of recurrent mixers aren't counted: their size doesn't depend on the number of positions.
    """
    config = model.config
    attentions = [found for found in map(softmax_attention, decoder_of(model).layers) if found is not None]
    if getattr(config, "kv_lora_rank", None):
        # DeepSeek's attention caches the compressed latent from which keys and values are computed.
        return len(attentions) * int(config.kv_lora_rank + config.qk_rope_head_dim)
    return sum(sum(_attention_widths(each)[1:]) for each in attentions)
