"""Predicts the bytes of a model's weights, caches and activations from its config alone."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from moevolve.evaluators.errors import opening
from moevolve.workers.checkpoints.loading import check_weights
from moevolve.workers.contract.facts import ModelFacts
from moevolve.workers.contract.settings import ModelConfig
from moevolve.workers.engine.columns import Layout
from moevolve.workers.engine.packed_attention import packs
from moevolve.workers.engine.tokenizing import context_of
from moevolve.workers.families.base import CORRECTION_BIAS
from moevolve.workers.families.decoder import decoder_of, softmax_attention
from moevolve.workers.families.layers import find_moe_layers
from moevolve.workers.model.describe import describe_config, meta_model
from moevolve.workers.profiling.activations import (
    attention_widths,
    dense_width,
    mixer_bytes,
    network_bytes,
    scores_bytes,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, slots=True)
class ModelOutline:
    """Sizes of a model, without its weights.

    Attributes:
        weight_bytes: Bytes of parameters and buffers as a worker loads them.
        expert_bytes: Bytes of every fused expert tensor, for each MoE layer.
        cache_bytes: Bytes of the KV cache per position, over all layers.
        attention_bytes: Peak activation memory of a layer's attention, or of the recurrent mixer that it has instead,
            in bytes per position that is run; see `moevolve.workers.profiling.activations`.
        network_bytes: Peak activation memory of a layer's feed-forward network, in bytes per token.
        scores_bytes: Bytes per pair of a query and a key in the same sequence, which `eager` attention holds; on a CPU
            it runs in small blocks.
        repeated_bytes: Bytes per cached position of keys and values that attention with a mask repeats.
        caches: True if decoding continues from the KV cache of the pass over answers. With sliding windows this is
            possible only on a CPU, where attention knows each token's position.
        intermediate: Neurons of an expert, or of a dense network.
    """

    facts: ModelFacts
    layers: int
    weight_bytes: int
    expert_bytes: tuple[tuple[int, ...], ...] = field(repr=False)
    cache_bytes: int
    attention_bytes: int
    network_bytes: int
    scores_bytes: int
    repeated_bytes: int
    caches: bool
    layout: Layout
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
        # By default torch's `CachingHostAllocator` rounds every tensor up to a power of two.
        return sum(1 << (size - 1).bit_length() for sizes in self.expert_bytes for size in sizes)


def outline_model(config: ModelConfig) -> ModelOutline:
    """Outline a checkpoint from its config.json, after checking the headers of its files if they are there.

    Raises:
        UserError: The config can't be read, the files aren't those of its model, or the family isn't supported.
    """
    check_weights(config)
    with opening(f"model {config.path}: it can't be described"):
        model = meta_model(config)
        decoder = decoder_of(model)
        output = model.get_output_embeddings()
        facts = describe_config(model, config)
        hidden, size = int(model.config.hidden_size), facts.dtype_bytes
        intermediate = facts.dense.width if facts.dense else facts.expert_parameters // (3 * hidden)
        mixers = [mixer_bytes(layer, hidden, size) for layer in decoder.layers]
        dense = max(map(dense_width, decoder.layers))
        # Correction biases are loaded in float32, whatever the dtype.
        buffers = sum(
            (4 if name.endswith(CORRECTION_BIAS) else each.itemsize) * each.numel()
            for name, each in model.named_buffers()
        )
        cached = DynamicCache(config=model.config).layers
        packed = packs(model, cached)
        on_cpu = packed and config.device == "cpu"
        eager = model.config._attn_implementation == "eager"
        return ModelOutline(
            facts=facts,
            layers=len(decoder.layers),
            weight_bytes=sum(each.nbytes for each in model.parameters()) + buffers,
            expert_bytes=tuple(
                tuple(tensor.nbytes for tensor in layer.expert_tensors().values())
                for layer in find_moe_layers(model, config.path)
            ),
            cache_bytes=_cached_values(model) * size,
            attention_bytes=max(held for held, _ in mixers),
            network_bytes=network_bytes(hidden, dense, facts.active, intermediate, size),
            scores_bytes=0 if on_cpu or not eager else scores_bytes(decoder.layers, size),
            repeated_bytes=max(repeated for _, repeated in mixers),
            # As `moevolve.workers.engine.forward.Forward.rewinds`.
            caches=on_cpu or all(type(layer) is DynamicLayer for layer in cached),
            layout="packed" if packed else "padded",
            hidden=hidden,
            vocabulary=int(output.weight.shape[0]),
            intermediate=intermediate,
            positions=context_of(model.config) or sys.maxsize,
        )


def _cached_values(model: PreTrainedModel) -> int:
    """Return the number of values per position in the KV cache of all layers.

    States of recurrent mixers aren't counted: their size doesn't depend on the number of positions.
    """
    config = model.config
    attentions = [found for found in map(softmax_attention, decoder_of(model).layers) if found is not None]
    if getattr(config, "kv_lora_rank", None):
        # DeepSeek's attention caches the compressed latent from which keys and values are computed.
        return len(attentions) * int(config.kv_lora_rank + config.qk_rope_head_dim)
    return sum(sum(attention_widths(each)[1:]) for each in attentions)
