"""Leaves out of a forward pass the feed-forward work that nobody reads.

A feed-forward block (MoE or dense) treats every position by itself. So padding never needs it, and in the last decoder
layer, whose keys and values come from its input, only the positions whose logits are asked for do.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

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
def lean_blocks(model: nn.Module, mask: Tensor, keep: int) -> Iterator[None]:
    """For the length of a `with` block, let feed-forward blocks compute only what the kept logits depend on.

    Hooks of others on these blocks, or within them, see the selected positions only, as [1, positions, hidden].

    Args:
        model: a `transformers` causal LM whose decoder has `layers`, each with a position-wise block `mlp` that takes
            hidden states [rows, columns, hidden] as its first argument; layers without one run as ever.
        mask: int64 [rows, columns], the pass's own columns, 1 where there is a token.
        keep: how many closing columns have their logits read.
    """
    layers = getattr(model.get_decoder(), "layers", ())  # type: ignore[operator]
    blocks = [getattr(layer, "mlp", None) for layer in layers]
    rows, columns = mask.shape
    real = mask.reshape(-1).nonzero().squeeze(1)
    read = real[real % columns >= columns - keep]
    handles = []
    try:
        for i, block in enumerate(blocks):
            index = read if i == len(blocks) - 1 else real
            if isinstance(block, nn.Module) and len(index) < rows * columns:
                selection = _Selection(index, rows, columns)
                handles.append(block.register_forward_pre_hook(selection.before))
                handles.append(block.register_forward_hook(selection.after))
        yield
    finally:
        for handle in handles:
            handle.remove()
