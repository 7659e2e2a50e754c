"""Attention between packed columns (`moevolve.workers.columns`): whole sequences are gathered for it, and it alone.

`transformers`' models take their attention from a registry, by the name in their config. For the length of a pass that
name is another one, under which the model's own kind of attention runs part by part on gathered sequences.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from moevolve.workers.columns import AttentionPart

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_NAME = "moevolve_packed"
KINDS = ("sdpa", "eager")
"""Attention, as `attn_implementation` has it, that runs between packed columns."""
_CACHES = ("DynamicLayer", "DynamicSlidingWindowLayer")

_PARTS: ContextVar[tuple[str, Sequence[AttentionPart]]] = ContextVar("parts")


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
def packed(model: PreTrainedModel, parts: Sequence[AttentionPart]) -> Iterator[None]:
    """For the length of a `with` block, let a model that `packs` attend as `parts` say, and make no mask itself.

    The columns of a pass are those of `parts`, in one row, or in several that are alike.
    """
    configs = _configs(model)
    kind = configs[0]._attn_implementation
    token = _PARTS.set((kind, parts))
    try:
        for config in configs:
            config._attn_implementation = _NAME
        yield
    finally:
        for config in configs:
            config._attn_implementation = kind
        _PARTS.reset(token)


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
    kind, parts = _PARTS.get()
    inner = ALL_ATTENTION_FUNCTIONS[kind] if kind != "eager" else _plain(type(module))
    assert inner is not None
    window = settings.get("sliding_window")
    query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    rows, columns = query.shape[:2]
    output: Tensor | None = None
    for part in parts:
        found, _ = inner(
            module,
            _gather(query, part.queries, part),
            _gather(key, part.keys, part),
            _gather(value, part.keys, part),
            _there(part.mask(window, query.dtype if kind == "eager" else None), query),
            **settings,
        )
        found = found.reshape(rows, -1, *found.shape[2:])
        if output is None:
            output = found.new_empty(rows, columns, *found.shape[2:])
        output.index_copy_(1, part.targets.to(found.device), found.index_select(1, part.sources.to(found.device)))
    assert output is not None
    return output, None


def _gather(states: Tensor, places: Tensor, part: AttentionPart) -> Tensor:
    """[rows, columns, heads, width] -> [rows * the part's rows, heads, tokens, width]."""
    gathered = states.index_select(1, places.to(states.device))
    return gathered.view(len(states) * part.rows, -1, *gathered.shape[2:]).transpose(1, 2)


def _there(mask: Tensor | None, states: Tensor) -> Tensor | None:
    return None if mask is None else mask.to(states.device)


AttentionInterface.register(_NAME, _attend)
