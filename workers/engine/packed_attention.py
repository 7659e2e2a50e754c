"""Attention between packed columns (`workers/engine/columns.py`), for which whole sequences are gathered.

Models of `transformers` look up their attention in a registry by the name in their config. During a pass that name is
replaced by ours, whose function runs the model's own kind of attention part by part on gathered sequences.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from moevolve.workers.engine.columns import Attention, Step
from moevolve.workers.families.registry import pads_left

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

_NAME = "moevolve_packed"
# Attention of `transformers` that can run between packed columns; flash attention has another layout.
_KINDS = {"sdpa", "eager"}
_CACHES = ("DynamicLayer", "DynamicSlidingWindowLayer")

# Attention of the queries at a range of positions (first, end): maps queries, keys and values, [n, heads, tokens,
# width], to outputs [n, tokens, heads, width].
Block = Callable[[int, int, Tensor, Tensor, Tensor], Tensor]

_NOW: ContextVar[tuple[str, Attention | Step]] = ContextVar("attention")


def packs(model: PreTrainedModel, layers: Sequence[object]) -> bool:
    """Return whether a model's attention can run between packed columns.

    The model must look up its attention in the registry, and nothing else in it may pass information between tokens, as
    `layers` of an empty KV cache for the model show. Nor may it depend on a token's place in a row.
    """
    if not pads_left(model.config.model_type):
        return False
    kinds = {config._attn_implementation for config in _configs(model)}
    if len(kinds) != 1 or not kinds <= _KINDS or not getattr(model, "_supports_attention_backend", False):
        return False
    if "eager" in kinds and _eager(type(model)) is None:
        return False
    return all(type(layer).__name__ in _CACHES for layer in layers)


@contextmanager
def packed(model: PreTrainedModel, attention: Attention | Step) -> Iterator[None]:
    """Context manager in which a model that `packs` computes attention as `attention` says, without its own mask.

    A pass has its columns in one row, or in several rows of equal layout.
    """
    configs = _configs(model)
    kind = configs[0]._attn_implementation
    token = _NOW.set((kind, attention))
    try:
        for config in configs:
            config._attn_implementation = _NAME
        yield
    finally:
        for config in configs:
            config._attn_implementation = kind
        _NOW.reset(token)


def _configs(model: PreTrainedModel) -> list[PretrainedConfig]:
    """Return the distinct configs of a model's modules that attention may read."""
    found = (getattr(module, "config", None) for module in model.modules())
    return list({id(config): config for config in found if hasattr(config, "_attn_implementation")}.values())


def _eager(kind: type) -> Callable[..., tuple[Tensor, Tensor | None]] | None:
    """Return the eager attention function in the modelling file of a module's class."""
    return getattr(sys.modules[kind.__module__], "eager_attention_forward", None)


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: None, **settings: Any
) -> tuple[Tensor, None]:
    """Attention function for the registry: maps [rows, heads, columns, width] to [rows, columns, heads, width]."""
    kind, attention = _NOW.get()
    inner = ALL_ATTENTION_FUNCTIONS[kind] if kind != "eager" else _eager(type(module))
    assert inner is not None
    # Of these implementations only PyTorch's fused attention, which needs values as wide as keys, computes every row
    # independently of the others.
    row_by_row = query.device.type == "cpu" and (kind == "eager" or key.shape[-1] != value.shape[-1])

    def block(first: int, end: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        window = settings.get("sliding_window")
        mask = attention.masks.of(first, end, window, query.dtype if kind == "eager" else None, queries.device)
        if not row_by_row:
            output: Tensor = inner(module, queries, keys, values, mask, **settings)[0]
            return output
        rows = zip(*(states.split(1) for states in (queries, keys, values)), strict=True)
        return torch.cat([inner(module, *row, mask, **settings)[0] for row in rows])

    queries, keys, values = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    if isinstance(attention, Step):
        return _attend_step(attention, block, queries, keys, values), None
    return _attend_packed(attention, block, queries, keys, values), None


def _attend_packed(attention: Attention, block: Block, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attention between packed columns; inputs and output are [rows, columns, heads, width]."""
    outputs = []
    for part in attention.parts:
        queries, keys, values = (
            states.index_select(1, columns.to(states.device))
            .view(len(states) * part.rows, -1, *states.shape[2:])
            .transpose(1, 2)  # [rows * part.rows, heads, tokens, width]
            for states, columns in ((query, part.queries), (key, part.keys), (value, part.keys))
        )
        output = query.new_empty(len(queries), part.length - part.start, query.shape[2], value.shape[3])
        for first, end in part.blocks:
            span = slice(first - part.start, end - part.start)
            output[:, span] = block(first, end, queries[:, :, span], keys[:, :, :end], values[:, :, :end])
        outputs.append(output.view(len(query), -1, *output.shape[2:]))
    joined = torch.cat(outputs, dim=1) if len(outputs) > 1 else outputs[0]
    return joined.index_select(1, attention.output_index.to(joined.device))


def _attend_step(step: Step, block: Block, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attention of one new column, [rows, 1, heads, width], to [rows, cached + 1, heads, width]."""
    outputs = []
    for group in step.groups:
        every = torch.arange(len(group.rows))
        queries = query.new_zeros(len(every), group.end - group.first, *query.shape[2:])
        queries[every, group.offsets] = query[group.rows, 0]
        keys, values = (states[group.rows[:, None], group.columns].transpose(1, 2) for states in (key, value))
        output = block(group.first, group.end, queries.transpose(1, 2), keys, values)
        outputs.append(output[every, group.offsets])
    return torch.cat(outputs).index_select(0, step.output_index).unsqueeze(1)


AttentionInterface.register(_NAME, _attend)
