"""Attention between packed columns (`workers/engine/columns.py`): whole sequences are gathered for it, and it alone.

`transformers`' models take their attention from a registry, by the name in their config. For the length of a pass that
name is another one, under which the model's own kind of attention runs part by part on gathered sequences.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from moevolve.workers.engine.columns import BLOCK, Attention, AttentionPart, Masks

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_NAME = "moevolve_packed"
KINDS = ("sdpa", "eager")
"""Attention, as `attn_implementation` has it, that runs between packed columns."""
_CACHES = ("DynamicLayer", "DynamicSlidingWindowLayer")

Block = Callable[[int, int, Tensor, Tensor, Tensor], Tensor]

_NOW: ContextVar[tuple[str, Attention | Step]] = ContextVar("attention")


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
def packed(model: PreTrainedModel, attention: Attention | Step) -> Iterator[None]:
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


@dataclass(frozen=True, slots=True, eq=False)
class StepGroup:
    """Rows whose next tokens stand in the same block of their sequences.

    Attributes:
        rows: which, int64 [n].
        columns: of their tokens in the cache, the new one's last, then anything, int64 [n, end].
        at: the new tokens' places in the block, int64 [n].
        first, end: places of the block.
    """

    rows: Tensor
    columns: Tensor
    at: Tensor
    first: int
    end: int


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """The next token of every row, after cached ones; on a CPU it attends as it would in a pass over the sequence.

    Attributes:
        groups: all rows.
        found: per row, where its result is among those of all groups, int64 [rows].
        masks: of the groups.
    """

    groups: tuple[StepGroup, ...]
    found: Tensor
    masks: Masks

    @classmethod
    def of(cls, mask: Tensor, masks: Masks) -> Step:
        """From a mask, int64 [rows, cached + 1], 1 where there is a token of the row."""
        places = mask.sum(dim=1) - 1
        order = mask.argsort(dim=1, descending=True, stable=True)
        blocks = places // BLOCK
        groups = []
        for block in blocks.unique().tolist():
            rows = (blocks == block).nonzero().squeeze(1)
            end = (block + 1) * BLOCK
            columns = nn.functional.pad(order[rows, :end], (0, max(0, end - order.shape[1])))
            groups.append(StepGroup(rows, columns, places[rows] % BLOCK, block * BLOCK, end))
        return cls(tuple(groups), torch.cat([group.rows for group in groups]).argsort(), masks)


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: None, **settings: Any
) -> tuple[Tensor, None]:
    """What the registry calls: [rows, heads, columns, width] each; gives [rows, columns, heads, width]."""
    kind, attention = _NOW.get()
    inner = ALL_ATTENTION_FUNCTIONS[kind] if kind != "eager" else _plain(type(module))
    assert inner is not None
    # Only PyTorch's own attention, which it uses for heads of one width, computes every row by itself.
    alone = query.device.type == "cpu" and (kind == "eager" or key.shape[-1] != value.shape[-1])

    def block(first: int, end: int, asking: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Tokens from one place to another: [n, heads, asking, width] to [n, asking, heads, width]."""
        window = settings.get("sliding_window")
        mask = attention.masks.of(first, end, window, query.dtype if kind == "eager" else None, asking.device)
        if not alone:
            made: Tensor = inner(module, asking, keys, values, mask, **settings)[0]
            return made
        rows = zip(*(states.split(1) for states in (asking, keys, values)), strict=True)
        return torch.cat([inner(module, *row, mask, **settings)[0] for row in rows])

    queries, keys, values = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    if isinstance(attention, Step):
        return _next(attention, block, queries, keys, values), None
    return _between(attention, block, queries, keys, values), None


def _between(attention: Attention, block: Block, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attention between packed columns, [rows, columns, heads, width] of the same."""
    outputs = []
    for part in attention.parts:
        asking, keys, values = (
            _gather(states, places, part)
            for states, places in ((query, part.queries), (key, part.keys), (value, part.keys))
        )
        output = query.new_empty(len(asking), part.length - part.start, query.shape[2], value.shape[3])
        for first, end in part.blocks:
            place = slice(first - part.start, end - part.start)
            output[:, place] = block(first, end, asking[:, :, place], keys[:, :, :end], values[:, :, :end])
        outputs.append(output.view(len(query), -1, *output.shape[2:]))
    joined = torch.cat(outputs, dim=1) if len(outputs) > 1 else outputs[0]
    return joined.index_select(1, attention.found.to(joined.device))


def _gather(states: Tensor, places: Tensor, part: AttentionPart) -> Tensor:
    """[rows, columns, heads, width] -> [rows * the part's rows, heads, tokens, width]."""
    gathered = states.index_select(1, places.to(states.device))
    return gathered.view(len(states) * part.rows, -1, *gathered.shape[2:]).transpose(1, 2)


def _next(step: Step, block: Block, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attention of one column, [rows, 1, heads, width], to [rows, cached + 1, heads, width]."""
    outputs = []
    for group in step.groups:
        every = torch.arange(len(group.rows))
        asking = query.new_zeros(len(every), group.end - group.first, *query.shape[2:])
        asking[every, group.at] = query[group.rows, 0]
        keys, values = (states[group.rows[:, None], group.columns].transpose(1, 2) for states in (key, value))
        output = block(group.first, group.end, asking.transpose(1, 2), keys, values)
        outputs.append(output[every, group.at])
    return torch.cat(outputs).index_select(0, step.found).unsqueeze(1)


AttentionInterface.register(_NAME, _attend)
