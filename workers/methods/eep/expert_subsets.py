"""How much a MoE layer's output changes if only some of its experts are kept.

Source: Not All Experts are Equal (NAEE; arXiv 2402.14800), Sec. 3.2: per layer, every choice of retained experts is
tried, and the one whose output is nearest the whole layer's in the Frobenius norm is kept; inputs are those of the
unedited model.

A layer's output is a weighted sum of its experts' outputs, so a difference of two routings has the squared length
`d^T G d`, where `d` is the difference of the routing weights and `G` the inner products of the n experts' outputs on
the token. `G` and the router's logits of a sample of tokens are all that is kept: no expert runs twice on a token.

Where there are more choices than a limit, experts are dropped one at a time, always the one that changes the output
least (our own fallback; the paper only tries all choices).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import combinations
from math import comb
from typing import Protocol, Self

import torch
from torch import Tensor, nn

from moevolve.evaluators.errors import UserError
from moevolve.kernels.routing import route_selected
from moevolve.workers.families.layers import MoELayer
from moevolve.workers.methods.eep.edit import SubsetRecipe

ROWS_AT_ONCE = 4096
"""Experts' outputs that are held at once."""


@dataclass(frozen=True, slots=True, eq=False)
class Routed:
    """Tokens of one row of sequences in one layer.

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

    def over_all(self, rows: slice | Tensor) -> Tensor:
        """These tokens' routing weights by expert, 0 for those that they didn't choose: float32 [rows, n]."""
        weights, chosen = self.weights[rows].float(), self.chosen[rows]
        return weights.new_zeros(len(chosen), self.logits.shape[1]).scatter_(1, chosen, weights)

    def spaced(self, before: int, stride: int) -> Tensor:
        """Which of these tokens are every `stride`-th once `before` others were seen: int64, maybe none."""
        return torch.arange(len(self.hidden), device=self.hidden.device)[-before % stride :: stride]

    def parts(self, each: int) -> list[slice]:
        """All tokens, as many at a time as give at most `ROWS_AT_ONCE` outputs of `each` experts."""
        step = max(1, ROWS_AT_ONCE // each)
        return [slice(start, start + step) for start in range(0, len(self.hidden), step)]

    def _run(self, hidden: Tensor, index: Tensor) -> Tensor:
        """Experts' own outputs through the family's code at a routing weight of 1: [tokens, experts, hidden]."""
        self.runs[0] += index.numel()
        ones = torch.ones((index.numel(), 1), dtype=self.weights.dtype, device=hidden.device)
        rows = hidden.repeat_interleave(index.shape[1], dim=0)
        out: Tensor = self.experts(rows, index.reshape(-1, 1), ones)
        return out.view(*index.shape, -1)


SAMPLED_AT_ONCE = 64
"""Tokens whose outputs of all experts are held at once."""
MEMORY = 4 << 30
"""Most bytes of inner products kept on the host, all layers together."""


class SubsetSample:
    """Evenly spaced tokens of one layer, kept on the host.

    Args:
        layer: the layer.
        recipe: how many tokens at most, and how subsets route.
        tokens: how many tokens will be seen.
    """

    def __init__(self, layer: MoELayer, recipe: SubsetRecipe, tokens: int) -> None:
        self.count = layer.count
        self._device = layer.router_weight.device
        self._layer, self._recipe = layer, recipe
        self._stride = -(-tokens // recipe.sample)
        self._seen = 0
        self._kept: list[tuple[Tensor, Tensor, Tensor]] = []

    def add(self, routed: Routed) -> None:
        """Take in a row's tokens."""
        rows = routed.spaced(self._seen, self._stride)
        self._seen += len(routed.hidden)
        for part in rows.split(SAMPLED_AT_ONCE) if len(rows) else ():
            outputs = routed.run_all(part).float()
            products = torch.bmm(outputs, outputs.transpose(1, 2))
            self._kept.append((products.cpu(), routed.over_all(part).cpu(), routed.logits[part].float().cpu()))

    @contextmanager
    def loaded(self) -> Iterator[SubsetSample]:
        """The sample on its layer's device, for the length of a `with` block; all tokens were seen."""
        self._products, self._weights, self._logits = (
            torch.cat(each).to(self._device) for each in zip(*self._kept, strict=True)
        )
        self._whole = self._squares(self._weights)
        yield self
        del self._products, self._weights, self._logits

    def discrepancy(self, kept: Sequence[int]) -> float:
        """Squared change of the outputs if only `kept` experts are there, relative to the outputs' squared length.

        Only while it is loaded.
        """
        change = kept_weights(self._layer, kept, self._logits, self._recipe) - self._weights
        return self._squares(change) / self._whole if self._whole > 0 else 0.0

    def _squares(self, weights: Tensor) -> float:
        """Sum over tokens of the squared lengths of the experts' outputs in these proportions [tokens, n]."""
        sums = torch.bmm(self._products, weights.unsqueeze(2)).squeeze(2) * weights
        return max(0.0, float(sums.sum(dtype=torch.float64)))


def check_memory(layers: int, experts: int, tokens: int) -> None:
    """Refuse a sample that would not fit.

    Raises:
        UserError: its inner products take more than 4 GiB.
    """
    needed = layers * tokens * experts**2 * 4
    if needed > MEMORY:
        raise UserError(
            f"genome.naee_tokens: {tokens} tokens of {layers} layers of {experts} experts take "
            f"{needed / 2**30:.1f} GiB of the host's memory; use {tokens * MEMORY // needed} at most"
        )


def tries_all(experts: int, recipe: SubsetRecipe) -> bool:
    """Whether all subsets are tried."""
    return comb(experts, recipe.retained) <= recipe.limit


def kept_weights(layer: MoELayer, kept: Sequence[int], logits: Tensor, recipe: SubsetRecipe) -> Tensor:
    """Routing weights by expert where only `kept` ones are there, 0 for all others: float32 [tokens, n].

    Args:
        layer: whose router.
        kept: experts.
        logits: of all experts, float32 [tokens, n].
        recipe: how subsets route.
    """
    selected, bias = torch.tensor(kept, device=logits.device), layer.correction_bias
    weights, chosen = route_selected(
        logits,
        selected,
        recipe.active,
        layer.rule,
        recipe.logits_space,
        bias=None if bias is None else bias[selected],
    )
    return torch.zeros_like(logits).scatter_add_(1, selected[chosen], weights)


class Sample(Protocol):
    """Some tokens of one layer, on which subsets of its experts are tried."""

    @property
    def count(self) -> int:
        """Experts n."""
        ...

    def add(self, routed: Routed) -> None:
        """Take in a row's tokens."""
        ...

    def loaded(self) -> AbstractContextManager[Self]:
        """For the length of a `with` block, what subsets are tried with; all tokens were seen."""
        ...

    def discrepancy(self, kept: Sequence[int]) -> float:
        """How far the layer's output is off with `kept` experts only: squared, relative to its squared length."""
        ...


def compare_subsets(samples: Sequence[Sample], recipe: SubsetRecipe, name: str = "subset") -> dict[str, Tensor]:
    """Try subsets on every layer's sample.

    Args:
        samples: one per MoE layer, all tokens seen.
        recipe: which subsets.
        name: what the arrays' names begin with.

    Returns:
        `<name>_discrepancy` float32 [layers, C(n, n')] for all subsets in lexicographic order, where these are within
        the limit; otherwise `<name>_kept` int64 [groups, n'], what is left after dropping experts one by one.
        Discrepancies are those of `Sample.discrepancy`; those of a group's layers are added.
    """
    count = samples[0].count
    if tries_all(count, recipe):
        subsets, rows = list(combinations(range(count), recipe.retained)), []
        for sample in samples:
            with sample.loaded():
                rows.append([sample.discrepancy(kept) for kept in subsets])
        return {f"{name}_discrepancy": torch.tensor(rows)}
    groups = [
        [sample for sample, owner in zip(samples, recipe.layer_groups, strict=True) if owner == group]
        for group in range(max(recipe.layer_groups) + 1)
    ]
    return {f"{name}_kept": torch.tensor([_drop_one_by_one(group, recipe.retained) for group in groups])}


def _drop_one_by_one(samples: Sequence[Sample], retained: int) -> list[int]:
    kept = list(range(samples[0].count))
    with ExitStack() as stack:
        for sample in samples:
            stack.enter_context(sample.loaded())
        while len(kept) > retained:
            rests = [[other for other in kept if other != expert] for expert in kept]
            kept = min(rests, key=lambda rest: sum(sample.discrepancy(rest) for sample in samples))
    return kept
