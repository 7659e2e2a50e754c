"""A sequence's tokens as a router saw them."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

_ROWS = 4096
"""Experts' outputs that are held at once."""


@dataclass(frozen=True, slots=True, eq=False)
class Routed:
    """Tokens of one sequence in one layer.

    Attributes:
        experts: the family's experts.
        hidden: what goes into the experts, [tokens, hidden].
        logits: the router's, [tokens, n].
        weights: the chosen experts' routing weights, [tokens, k].
        chosen: their indices, int64 [tokens, k].
        runs: counts runs of an expert on a token.
    """

    experts: nn.Module
    hidden: Tensor
    logits: Tensor
    weights: Tensor
    chosen: Tensor
    runs: list[int] = field(repr=False)

    def run_chosen(self, rows: slice) -> Tensor:
        """The outputs of the experts that these tokens chose, [rows, k, hidden]."""
        return self._run(self.hidden[rows], self.chosen[rows])

    def run_all(self, rows: slice | Tensor) -> Tensor:
        """Every expert's output on these tokens, chosen or not, [rows, n, hidden]."""
        hidden, count = self.hidden[rows], self.logits.shape[1]
        return self._run(hidden, torch.arange(count, device=hidden.device).expand(len(hidden), count))

    def parts(self, each: int) -> list[slice]:
        """All tokens, as many at a time as give at most `_ROWS` outputs of `each` experts."""
        step = max(1, _ROWS // each)
        return [slice(start, start + step) for start in range(0, len(self.hidden), step)]

    def _run(self, hidden: Tensor, index: Tensor) -> Tensor:
        """Experts' own outputs through the family's code at a routing weight of 1: [tokens, experts, hidden]."""
        self.runs[0] += index.numel()
        ones = torch.ones((index.numel(), 1), dtype=self.weights.dtype, device=hidden.device)
        rows = hidden.repeat_interleave(index.shape[1], dim=0)
        out: Tensor = self.experts(rows, index.reshape(-1, 1), ones)
        return out.view(*index.shape, -1)
