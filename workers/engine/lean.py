"""Skips feed-forward computations whose outputs aren't read.

A feed-forward block (MoE or dense) computes every position separately. So it needn't run on padding, and in the last
decoder layer, whose keys and values come from its input, only on the positions whose logits are read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from moevolve.workers.families.registry import feed_forward


class _Selection:
    """Hooks that run a block on some positions only and set the outputs of the others to zero."""

    def __init__(self, index: Tensor, rows: int, columns: int) -> None:
        self._index, self._rows, self._columns = index, rows, columns

    def before(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        hidden, *rest = args
        chosen = hidden.reshape(-1, hidden.shape[-1]).index_select(0, self._index.to(hidden.device))
        return (chosen.unsqueeze(0), *rest)

    def after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        hidden = output[0] if isinstance(output, tuple) else output
        width = hidden.shape[-1]
        full = hidden.new_zeros(self._rows * self._columns, width)
        full.index_copy_(0, self._index.to(hidden.device), hidden.reshape(-1, width))
        full = full.view(self._rows, self._columns, width)
        return (full, *output[1:]) if isinstance(output, tuple) else full


@contextmanager
def lean_blocks(model: nn.Module, shape: Sequence[int], mask: Tensor | None, read: Tensor) -> Iterator[None]:
    """Context manager in which feed-forward blocks compute only what the logits that are read depend on.

    Other hooks on these blocks see only the selected positions, as [1, positions, hidden].

    Args:
        model: Causal language model whose decoder has `layers`, each with a feed-forward block that takes hidden
            states [rows, columns, hidden] as its first argument. Layers without one aren't changed.
        shape: Rows and columns of the pass.
        mask: 1 for tokens and 0 for padding, int64 [rows, columns]; None if nothing is padded.
        read: Places whose logits are read, none of them padding, int64 [places]; see `Columns.places`.
    """
    layers = getattr(model.get_decoder(), "layers", ())  # type: ignore[operator]
    blocks = [feed_forward(layer, getattr(model.config, "model_type", "")) for layer in layers]
    rows, columns = shape
    real = None if mask is None else mask.reshape(-1).nonzero().squeeze(1)
    handles = []
    try:
        for i, block in enumerate(blocks):
            index = torch.unique(read) if i == len(blocks) - 1 else real
            if isinstance(block, nn.Module) and index is not None and len(index) < rows * columns:
                selection = _Selection(index, rows, columns)
                handles.append(block.register_forward_pre_hook(selection.before))
                handles.append(block.register_forward_hook(selection.after))
        yield
    finally:
        for handle in handles:
            handle.remove()
