"""Leaves out of a forward pass the feed-forward work that nobody reads.

A feed-forward block (MoE or dense) treats every position by itself. So padding never needs it, and in the last decoder
layer, whose keys and values come from its input, only the positions whose logits are asked for do.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


class _Selection:
    """Hooks that show a block only some positions, and put zeros in the place of the others' outputs."""

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
    """For the length of a `with` block, let feed-forward blocks compute only what the logits that are read depend on.

    Hooks of others on these blocks, or within them, see the selected positions only, as [1, positions, hidden].

    Args:
        model: a `transformers` causal LM whose decoder has `layers`, each with a position-wise block `mlp` that takes
            hidden states [rows, columns, hidden] as its first argument; layers without one run as ever.
        shape: rows and columns of the pass.
        mask: int64 [rows, columns], the pass's own columns, 1 where there is a token; None where there is everywhere.
        read: columns whose logits are read, in all rows counted through, int64; none is padding.
    """
    layers = getattr(model.get_decoder(), "layers", ())  # type: ignore[operator]
    blocks = [getattr(layer, "mlp", None) for layer in layers]
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
