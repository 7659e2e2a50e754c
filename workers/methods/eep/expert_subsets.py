"""How much a MoE layer's output changes if only some of its experts are kept.

Source: Not All Experts are Equal (NAEE, arXiv 2402.14800), Sec. 3.2. For each layer the paper tries every subset of
retained experts on the unedited model's inputs, and keeps the one whose output is nearest the original in Frobenius
norm.

A layer's output is a weighted sum of its experts' outputs. So the outputs of two routings differ by the squared norm
`d^T G d`, where `d` is the difference of their routing weights and `G` holds the inner products of the n experts'
outputs on the token. Only `G` and the router's logits of a sample of tokens are stored, and no expert runs twice on a
token.

If there are more subsets than a limit, experts are dropped one at a time, always the one that changes the output least.
This fallback is ours; the paper only tries all subsets.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import combinations
from math import comb

import torch
from torch import Tensor, nn

from moevolve.evaluators.errors import UserError
from moevolve.kernels.routing import route_selected
from moevolve.workers.families.layers import MoELayer
from moevolve.workers.methods.eep.edit import SubsetRecipe

ROWS_AT_ONCE = 4096
"""Expert outputs (one expert on one token) held in memory at once."""
SAMPLED_AT_ONCE = 64
"""Tokens for which the outputs of all experts are held in memory at once."""
MEMORY = 4 << 30
"""Limit on the bytes of inner products stored on the host, for all layers together."""


@dataclass(frozen=True, slots=True, eq=False)
class RoutedTokens:
    """Tokens of one forward pass in one MoE layer, and their routing.

    Attributes:
        experts: The family's experts module.
        hidden: Inputs of the experts, [tokens, hidden].
        logits: Logits of the router, [tokens, n].
        weights: Routing weights of the chosen experts, [tokens, k].
        chosen: The chosen experts, int64 [tokens, k].
    """

    experts: nn.Module
    hidden: Tensor
    logits: Tensor
    weights: Tensor
    chosen: Tensor

    def chosen_outputs(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Outputs [rows, k, hidden], without weights, of the experts that some tokens chose, weights and experts."""
        for rows in self.chunks(self.chosen.shape[1]):
            yield self._run(self.hidden[rows], self.chosen[rows]), self.weights[rows], self.chosen[rows]

    def run_all(self, rows: slice | Tensor) -> Tensor:
        """Outputs of all experts on these tokens, chosen or not, [rows, n, hidden]."""
        hidden, count = self.hidden[rows], self.logits.shape[1]
        return self._run(hidden, torch.arange(count, device=hidden.device).expand(len(hidden), count))

    def chunks(self, each: int) -> list[slice]:
        """Slices that cover all tokens, each with at most `ROWS_AT_ONCE` outputs if a token runs `each` experts."""
        step = max(1, ROWS_AT_ONCE // each)
        return [slice(start, start + step) for start in range(0, len(self.hidden), step)]

    def _run(self, hidden: Tensor, index: Tensor) -> Tensor:
        # The family's own code at a routing weight of 1.
        ones = torch.ones((index.numel(), 1), dtype=self.weights.dtype, device=hidden.device)
        rows = hidden.repeat_interleave(index.shape[1], dim=0)
        out: Tensor = self.experts(rows, index.reshape(-1, 1), ones)
        return out.view(*index.shape, -1)


class SubsetSample:
    """Evenly spaced ones of `tokens` tokens of a layer, kept on the host, on which subsets of experts are compared."""

    def __init__(self, layer: MoELayer, recipe: SubsetRecipe, tokens: int) -> None:
        self.count = layer.count
        self._device = layer.router_weight.device
        self._layer, self._recipe = layer, recipe
        self._stride = -(-tokens // recipe.sample)
        self._seen = 0
        self._kept: list[tuple[Tensor, Tensor, Tensor]] = []

    def add(self, routed: RoutedTokens) -> None:
        """Take a sample of these tokens."""
        tokens = torch.arange(len(routed.hidden), device=routed.hidden.device)
        rows = tokens[-self._seen % self._stride :: self._stride]
        self._seen += len(tokens)
        for part in rows.split(SAMPLED_AT_ONCE) if len(rows) else ():
            outputs, logits = routed.run_all(part).float(), routed.logits[part].float()
            products = torch.bmm(outputs, outputs.transpose(1, 2))
            weights = torch.zeros_like(logits).scatter_(1, routed.chosen[part], routed.weights[part].float())
            self._kept.append((products.cpu(), weights.cpu(), logits.cpu()))

    @contextmanager
    def loaded(self) -> Iterator[None]:
        """Have the whole sample on the layer's device within a `with` block."""
        self._products, self._weights, self._logits = (
            torch.cat(each).to(self._device) for each in zip(*self._kept, strict=True)
        )
        self._whole = self._squares(self._weights)
        yield
        del self._products, self._weights, self._logits

    def discrepancy(self, kept: Sequence[int]) -> float:
        """Squared error of the layer's output with `kept` experts only, relative to the output's squared norm.

        Call it while the sample is loaded.
        """
        change = self._kept_weights(kept) - self._weights
        return self._squares(change) / self._whole if self._whole > 0 else 0.0

    def _kept_weights(self, kept: Sequence[int]) -> Tensor:
        """Routing weights for all experts if only some are kept, 0 for the others: float32 [tokens, n]."""
        recipe, bias = self._recipe, self._layer.correction_bias
        selected = torch.tensor(kept, device=self._logits.device)
        weights, chosen = route_selected(
            self._logits,
            selected,
            recipe.active,
            self._layer.rule,
            recipe.logits_space,
            bias=None if bias is None else bias[selected],
        )
        return torch.zeros_like(self._logits).scatter_add_(1, selected[chosen], weights)

    def _squares(self, weights: Tensor) -> float:
        """Squared norm of the layer's output with routing weights [tokens, n], summed over tokens."""
        sums = torch.bmm(self._products, weights.unsqueeze(2)).squeeze(2) * weights
        return max(0.0, float(sums.sum(dtype=torch.float64)))


def check_memory(layers: int, experts: int, tokens: int) -> None:
    """Refuse a sample whose inner products take more than `MEMORY` on the host."""
    needed = layers * tokens * experts**2 * 4
    if needed > MEMORY:
        raise UserError(
            f"genome.naee_tokens: {tokens} tokens of {layers} layers of {experts} experts take "
            f"{needed / 2**30:.1f} GiB of the host's memory; use {tokens * MEMORY // needed} at most"
        )


def tries_all(experts: int, recipe: SubsetRecipe) -> bool:
    """Whether all subsets are tried, and not only those that dropping experts one by one leads to."""
    return comb(experts, recipe.retained) <= recipe.limit


def compare_subsets(samples: Sequence[SubsetSample], recipe: SubsetRecipe) -> dict[str, Tensor]:
    """Compare subsets of experts on every MoE layer's complete sample.

    Returns:
        `subset_discrepancy` float32 [layers, C(n, n')], the discrepancies of all subsets in lexicographic order, if
        there are at most `recipe.limit`. Otherwise `subset_kept` int64 [groups, n'], the experts that remain after
        dropping the others one by one, each time with the least sum of discrepancies over a group's layers.
    """
    count = samples[0].count
    if tries_all(count, recipe):
        subsets, rows = list(combinations(range(count), recipe.retained)), []
        for sample in samples:
            with sample.loaded():
                rows.append([sample.discrepancy(kept) for kept in subsets])
        return {"subset_discrepancy": torch.tensor(rows)}
    groups = [
        [sample for sample, owner in zip(samples, recipe.layer_groups, strict=True) if owner == group]
        for group in range(max(recipe.layer_groups) + 1)
    ]
    return {"subset_kept": torch.tensor([_drop_one_by_one(group, recipe.retained) for group in groups])}


def _drop_one_by_one(samples: Sequence[SubsetSample], retained: int) -> list[int]:
    kept = list(range(samples[0].count))
    with ExitStack() as stack:
        for sample in samples:
            stack.enter_context(sample.loaded())
        while len(kept) > retained:
            rests = [[other for other in kept if other != expert] for expert in kept]
            kept = min(rests, key=lambda rest: sum(sample.discrepancy(rest) for sample in samples))
    return kept
