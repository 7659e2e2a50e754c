"""A sequence's tokens as a router saw them."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn


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

    def run(self, hidden: Tensor, expert: int) -> Tensor:
        """An expert's own outputs on tokens [tokens, hidden], through the family's code at a routing weight of 1."""
        self.runs[0] += len(hidden)
        index = torch.full((len(hidden), 1), expert, dtype=torch.int64, device=hidden.device)
        ones = torch.ones((len(hidden), 1), dtype=self.weights.dtype, device=hidden.device)
        out: Tensor = self.experts(hidden, index, ones)
        return out
