"""The shared expert of a MoE layer, which every token uses beside the routed ones, with output weights to change."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from moevolve.workers.families.layers import MoELayer

_ROWS = 1024
"""Number of tokens whose activations are computed at once."""


class SharedExpert:
    """Switches the output projection of a layer's shared expert, which it must have, between the original and a copy.

    The copy is made when the first weights are changed. Its memory is reused by later edits.
    """

    def __init__(self, layer: MoELayer) -> None:
        module, gate = layer.shared_expert, layer.shared_expert_gate
        assert module is not None
        down = module.down_proj
        assert isinstance(down, nn.Linear)
        self._module, self._gate, self._down = module, gate, down
        self._original = down.weight
        self._copy: nn.Parameter | None = None

    @property
    def width(self) -> int:
        """Number of neurons."""
        return int(self._original.shape[1])

    @property
    def weights(self) -> Tensor:
        """A view of the output projection in use, [neurons, hidden]."""
        return self._down.weight.data.t()

    @torch.inference_mode(False)  # the copy may become an exported parameter, which inference tensors can't
    def make_writable(self) -> None:
        """Use the copy of the output projection, because the caller will change it there."""
        if self._down.weight is not self._original:
            return
        if self._copy is None:
            self._copy = nn.Parameter(torch.empty_like(self._original), requires_grad=False)
        self._copy.data.copy_(self._original.data)
        self._down.weight = self._copy

    def reset(self) -> None:
        """Use the original output projection."""
        self._down.weight = self._original

    @contextmanager
    def unedited(self) -> Iterator[None]:
        """Use the original output projection within a `with` block."""
        current = self._down.weight
        self.reset()
        try:
            yield
        finally:
            self._down.weight = current

    def activations(self, hidden: Tensor, columns: slice) -> Tensor:
        """Inputs of the output projection, times the gate that the family puts on the expert's output, if any.

        For inputs of the expert [tokens, hidden] and some neurons: float32 [tokens, columns].
        """
        found: list[Tensor] = []
        handle = self._down.register_forward_pre_hook(lambda _, args: found.append(args[0][:, columns].float()))
        try:
            for rows in hidden.split(_ROWS):
                self._module(rows)
        finally:
            handle.remove()
        values = torch.cat(found)
        return values if self._gate is None else values * torch.sigmoid(self._gate(hidden).float())
