"""Attention between packed columns (`workers/engine/columns.py`): whole sequences are gathered for it, and it alone.

`transformers`' models take their attention from a registry, by the name in their config. For the length of a pass that
name is another one, under which the model's own kind of attention runs part by part on gathered sequences.
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

from moevolve.workers.engine.columns import Attention, AttentionPart

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_NAME = "moevolve_packed"
KINDS = ("sdpa", "eager")
"""Attention, as `attn_implementation` has it, that runs between packed columns."""
_CACHES = ("DynamicLayer", "DynamicSlidingWindowLayer")

_NOW: ContextVar[tuple[str, Attention]] = ContextVar("attention")


def packs(model: PreTrainedModel, layers: Sequence[Any]) -> bool:
    """Whether a model's attention can run between packed columns.

    It must take it from the registry, as PyTorch's or in plain products (flash attention has a layout of its own), and
    nothing else in it may look from one token to another.

    Args:
        model: any.
        layers: of an empty cache of its.
    """
    kinds = {config._attn_implementation for config in _configs(model)}
    if len(kinds) != 1 or not kinds <= set(KINDS) or not getattr(model, "_supports_attention_backend", False):
        return False
    if "eager" in kinds and _plain(type(model)) is None:
        return False
    return all(type(layer).__name__ in _CACHES for layer in layers)


@contextmanager
def packed(model: PreTrainedModel, attention: Attention) -> Iterator[None]:
    """For the length of a `with` block, let a model that `packs` attend as `attention` says, and make no mask itself.

    A pass has its columns in one row, or in several that are alike.
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


def _configs(model: PreTrainedModel) -> list[Any]:
    """The configs that its modules look at."""
    found = {
        id(config): config for module in model.modules() if (config := getattr(module, "config", None)) is not None
    }
    return list(found.values())


def _plain(kind: type) -> Callable[..., Any] | None:
    """The attention in plain products of the file that a module's class is from."""
    return getattr(sys.modules[kind.__module__], "eager_attention_forward", None)


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: None, **settings: Any
) -> tuple[Tensor, None]:
    """What the registry calls: [rows, heads, columns, width] each; gives [rows, columns, heads, width]."""
    kind, attention = _NOW.get()
    inner = ALL_ATTENTION_FUNCTIONS[kind] if kind != "eager" else _plain(type(module))
    assert inner is not None
    window = settings.get("sliding_window")
    query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    outputs = []
    for part in attention.parts:
        output, _ = inner(
            module,
            _gather(query, part.queries, part),
            _gather(key, part.keys, part),
            _gather(value, part.keys, part),
            _there(part.mask(window, query.dtype if kind == "eager" else None), query),
            **settings,
        )
        outputs.append(output.reshape(len(query), -1, *output.shape[2:]))
    joined = torch.cat(outputs, dim=1)
    return joined.index_select(1, attention.found.to(joined.device)), None


def _gather(states: Tensor, places: Tensor, part: AttentionPart) -> Tensor:
    """[rows, columns, heads, width] -> [rows * the part's rows, heads, tokens, width]."""
    gathered = states.index_select(1, places.to(states.device))
    return gathered.view(len(states) * part.rows, -1, *gathered.shape[2:]).transpose(1, 2)


def _there(mask: Tensor | None, states: Tensor) -> Tensor | None:
    return None if mask is None else mask.to(states.device)


AttentionInterface.register(_NAME, _attend)
