"""Statistics of a MoE model's experts on calibration prompts, in one pass over the unedited model.

Each statistic names its source. Sequences run without padding. Routing weights are those that the family applies, so
they are rescaled if it rescales the top-k.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from math import comb
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from moevolve.evaluators.errors import UserError
from moevolve.kernels.products import weighted_sum
from moevolve.kernels.routing import choose_kept, kept_places, route_selected
from moevolve.workers.contract.edits import Calibration, Tokens
from moevolve.workers.contract.facts import ModelFacts
from moevolve.workers.contract.methods import Resident
from moevolve.workers.families.layers import MoELayer
from moevolve.workers.methods.eep.edit import ExpertsMeasurement, SubsetMeasurement

# Pairs of a token and a chosen expert that are added to the sums at once.
ROWS_AT_ONCE = 4096
# Tokens for which the outputs of all experts are held in memory at once.
SAMPLED_AT_ONCE = 64
# Limit on the bytes of inner products stored on the host, for all layers together.
MEMORY = 4 << 30


@dataclass(frozen=True, eq=False)
class RoutedTokens:
    """Tokens of one forward pass in one MoE layer, and their routing.

    Attributes:
        experts: The family's own code for experts.
        hidden: Inputs of the experts, [tokens, hidden].
        logits: Logits of the router, [tokens, n].
        weights: Routing weights of the chosen experts, [tokens, k].
        chosen: The chosen experts, int64 [tokens, k].
        norms: Norms of the chosen experts' outputs, without weights, float64 [tokens, k].
        scales: Factors of the experts' inputs, [tokens, n], where those are what routers weight; weights are 1 then.
    """

    experts: Callable[..., Tensor]
    hidden: Tensor
    logits: Tensor
    weights: Tensor
    chosen: Tensor
    norms: Tensor
    scales: Tensor | None = None

    def run_all(self, rows: Tensor) -> Tensor:
        """Return the outputs of all experts on these tokens, chosen or not, [rows, n, hidden]."""
        hidden, index = self.hidden[rows], torch.arange(self.logits.shape[1], device=rows.device)
        index = index.expand(len(rows), -1)
        if self.scales is not None:
            scaled = hidden[:, None] * self.scales[rows, :, None].to(hidden.dtype)
            hidden, index = scaled.flatten(0, 1), index.reshape(-1, 1)
        return _unweighted(self.experts, hidden, index).view(len(rows), -1, hidden.shape[-1])


def _unweighted(experts: Callable[..., Tensor], hidden: Tensor, chosen: Tensor) -> Tensor:
    """Return each chosen expert's outputs [tokens, k, hidden] by the family's own code, which gives their sums."""
    inputs = hidden.repeat_interleave(chosen.shape[1], dim=0)
    ones = torch.ones((len(inputs), 1), dtype=hidden.dtype, device=hidden.device)
    return experts(inputs, chosen.reshape(-1, 1), ones).view(*chosen.shape, -1)


class Measure(Protocol):
    """One statistic of one layer; every row of tokens is added by itself."""

    def add(self, routed: RoutedTokens) -> None: ...

    def arrays(self) -> dict[str, Tensor]: ...


def calibrate_experts(resident: Resident, sequences: Sequence[Tokens], measurement: ExpertsMeasurement) -> Calibration:
    """Measure every MoE layer's experts.

    Returns:
        Arrays whose first dimension is the MoE layers in order of depth:

        - `usage` gives `counts` int64 [layers, n], the number of tokens that chose each expert, and `soft_activation`
          float64 [layers, n], the sum over tokens of the softmax over all n experts.
        - `importance` gives `importance_sums` float64 [layers, n, 3, 3], the sums over an expert's tokens of the powers
          0, 1 and 2 of its routing weight times those of its output's norm; and `row_squares` float64 [layers, n, 4],
          the sums over rows of tokens of s^2, s c, c^2 and 1 if c > 0, where c is the number of a row's tokens that
          chose an expert, and s the sum over these of its routing weight times its output's norm; and
          `importance_tokens` int64 [layers], the number of tokens.
        - `pairs` gives `pair_norms` float64 [layers, n, n]: sums over tokens of the products of the norms of two
          experts' weighted outputs.
        - A comparison of subsets gives `subset_discrepancy` or `subset_kept`; see `compare_subsets`.

    Raises:
        UserError: A sample takes too much memory.
    """
    layers = resident.layers
    total = sum(len(each) for each in sequences)
    measures = [[_MEASURES[name](layer) for name in measurement.statistics] for layer in layers]
    subsets, samples = measurement.subsets, []
    if subsets is not None:
        tokens = min(total, subsets.sample)
        needed = 4 * len(layers) * tokens * layers[0].count ** 2  # the inner products, in float32 on the host
        if needed > MEMORY:
            raise UserError(
                f"genome.naee_tokens: {tokens} tokens of {len(layers)} layers of {layers[0].count} experts take "
                f"{needed / 2**30:.1f} GiB of the host's memory; use {tokens * MEMORY // needed} at most"
            )
        samples = [SubsetSample(layer, subsets, total) for layer in layers]
    with ExitStack() as stack:
        for place, layer in enumerate(layers):
            stack.enter_context(_observed(layer, [*measures[place], *samples[place : place + 1]]))
        resident.run(resident.rows(sequences))
    arrays: dict[str, Tensor] = {}
    for measure in zip(*measures, strict=True):
        found = [each.arrays() for each in measure]
        arrays |= {name: torch.stack([each[name].cpu() for each in found]) for name in found[0]}
    if subsets is not None:
        arrays |= compare_subsets(samples, subsets)
    return Calibration({name: array.numpy() for name, array in arrays.items()})


@contextmanager
def _observed(layer: MoELayer, measures: Sequence[Any]) -> Iterator[None]:
    """Add all tokens that a layer runs within a `with` block to its measures.

    Its experts run once on a token, without its routing weights, which then make the layer's output as usual.
    """
    experts, routed = layer.experts, list[tuple[Tensor, ...]]()
    own, forward = "forward" in vars(experts), experts.forward

    def route(module: nn.Module, args: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
        routed.append((layer.experts_input(args[0].reshape(-1, args[0].shape[-1])), *output))

    def run(hidden: Tensor, index: Tensor, factors: Tensor) -> Tensor:
        outputs = _unweighted(forward, hidden, index)
        states, logits, weights, chosen = routed.pop()
        norms = torch.linalg.vector_norm(outputs, dim=-1, dtype=torch.float64).view(chosen.shape)
        scales = None
        if layer.rule.scales_inputs:
            # What an expert gives depends on its own logit alone, so it counts as chosen with weight 1.
            scales, weights = logits.float().sigmoid(), torch.ones_like(weights)
        tokens = RoutedTokens(forward, states, logits, weights, chosen, norms, scales)
        for measure in measures:
            measure.add(tokens)
        return weighted_sum(outputs, factors)

    experts.forward = run
    hook = layer.gate.register_forward_hook(route)
    try:
        yield
    finally:
        hook.remove()
        if own:
            experts.forward = forward
        else:
            del experts.forward


def measuring_bytes(
    measurement: ExpertsMeasurement, facts: ModelFacts, hidden: int, row_bytes: int, longest: int
) -> int:
    """Peak device memory of calibration besides the model, in bytes: experts' outputs, or samples of tokens.

    If subsets are found by dropping experts one by one, the samples of all layers of a group are loaded together.

    Args:
        measurement, facts: Settings of the calibration, and sizes of the model.
        hidden: Width of the residual stream.
        row_bytes: Bytes of activations in a layer per token and expert that the token runs.
        longest: Tokens of the longest sequence.
    """
    n, row = facts.experts, row_bytes + hidden * facts.dtype_bytes
    # Experts get a copy of a token's state each, and their outputs are summed afterwards.
    most = longest * facts.active * (row + hidden * facts.dtype_bytes)
    if measurement.subsets is not None:
        tokens, subsets = min(measurement.subsets.sample, measurement.tokens), measurement.subsets
        outputs = min(SAMPLED_AT_ONCE, longest) * n * (row + 4 * (hidden + n))
        groups = subsets.layer_groups
        layers = 1 if tries_all(n, subsets) else max(groups.count(group) for group in set(groups))
        most = max(most, outputs, layers * tokens * n**2 * 4)
    return most


# Scores over all experts of families that take no softmax, by `RoutingRule.scores`.
_softmax = partial(torch.softmax, dim=-1)
_SCORES: dict[str, Callable[[Tensor], Tensor]] = {
    "sigmoid": torch.sigmoid,
    "sigmoid_of_chosen": torch.sigmoid,
    "sqrt_softplus_of_chosen": lambda logits: nn.functional.softplus(logits).sqrt(),
}


class _Usage:
    """How often experts are chosen, and the sum of their routing weights.

    Source: Efficient Expert Pruning (arXiv 2407.00945), App. A.2: activation frequency and soft activation. The paper
    calls softmax(W_G x) over all experts the routing weights (Sec. 3), so they are summed whether chosen or not.
    """

    def __init__(self, layer: MoELayer) -> None:
        self._counts = _zeros(layer, layer.count).long()
        self._soft = _zeros(layer, layer.count)
        self._scores = layer.rule.scores

    def add(self, routed: RoutedTokens) -> None:
        self._counts += routed.chosen.flatten().bincount(minlength=len(self._counts))
        scores = _SCORES.get(self._scores, _softmax)(routed.logits.float())
        self._soft += scores.sum(dim=0, dtype=torch.float64)

    def arrays(self) -> dict[str, Tensor]:
        return {"counts": self._counts, "soft_activation": self._soft}


class _Importance:
    """Sums over the tokens that chose an expert of powers of its routing weight and of its output's norm."""

    _POWERS = 3

    def __init__(self, layer: MoELayer) -> None:
        self._sums = _zeros(layer, layer.count, self._POWERS, self._POWERS)
        self._squares = _zeros(layer, layer.count, 4)
        self._tokens = 0

    def add(self, routed: RoutedTokens) -> None:
        powers, row = torch.arange(self._POWERS, device=self._sums.device), torch.zeros_like(self._sums)
        chosen, weights, norms = (each.flatten() for each in (routed.chosen, routed.weights.double(), routed.norms))
        for rows in torch.arange(len(chosen), device=chosen.device).split(ROWS_AT_ONCE):
            # A product with one-hot rows is deterministic; `bincount` isn't on every device.
            one_hot = nn.functional.one_hot(chosen[rows], len(self._sums)).double()
            products = (weights[rows, None] ** powers)[:, :, None] * (norms[rows, None] ** powers)[:, None, :]
            row += (one_hot.t() @ products.flatten(1)).view_as(row)
        self._sums += row
        self._tokens += len(routed.hidden)
        scores, counts = row[:, 1, 1], row[:, 0, 0]
        self._squares += torch.stack((scores**2, scores * counts, counts**2, (counts > 0).double()), dim=1)

    def arrays(self) -> dict[str, Tensor]:
        tokens = torch.tensor(self._tokens)
        return {"importance_sums": self._sums, "row_squares": self._squares, "importance_tokens": tokens}


class _Pairs:
    """Sums over tokens of the product of the norms of two chosen experts' weighted outputs; on the host."""

    def __init__(self, layer: MoELayer) -> None:
        self._norms = torch.zeros(layer.count, layer.count, dtype=torch.float64)

    def add(self, routed: RoutedTokens) -> None:
        # Added up on the host, since adding by index isn't deterministic on every device.
        norms, chosen = (routed.norms * routed.weights.double()).abs().cpu(), routed.chosen.cpu()
        pairs = (chosen[:, :, None] * len(self._norms) + chosen[:, None, :]).flatten()
        self._norms.view(-1).index_add_(0, pairs, (norms[:, :, None] * norms[:, None, :]).flatten())

    def arrays(self) -> dict[str, Tensor]:
        return {"pair_norms": self._norms}


def _zeros(layer: MoELayer, *shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.float64, device=layer.router_weight.device)


_MEASURES: dict[str, Callable[[MoELayer], Measure]] = {
    "usage": _Usage,
    "importance": _Importance,
    "pairs": _Pairs,
}


class SubsetSample:
    """How much a layer's output changes if only some of its experts are kept, on evenly spaced ones of `tokens` tokens.

    Source: Not All Experts are Equal (NAEE, arXiv 2402.14800), Sec. 3.2. For each layer the paper tries every subset of
    retained experts on the unedited model's inputs, and keeps the one whose output is nearest the original in Frobenius
    norm. If there are more subsets than a limit, experts are dropped one at a time, always the one that changes the
    output least. This fallback is ours.

    A layer's output is a weighted sum of its experts' outputs. So the outputs of two routings differ by the squared
    norm `d^T G d`, where `d` is the difference of their routing weights and `G` holds the inner products of the n
    experts' outputs on the token. Only `G` and the router's logits of the sample are kept, on the host, and no expert
    runs twice on a token.
    """

    def __init__(self, layer: MoELayer, measurement: SubsetMeasurement, tokens: int) -> None:
        self.count = layer.count
        self._device = layer.router_weight.device
        self._layer, self._measurement = layer, measurement
        self._stride = -(-tokens // measurement.sample)
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
        measurement, bias, table = self._measurement, self._layer.correction_bias, self._layer.table
        selected, fixed = torch.tensor(kept, device=self._logits.device), None
        if table is not None:
            places = kept_places(kept, self.count).to(selected.device)
            # In order of weight, not of the table: that order only decides which of a token's experts count twice.
            fixed = choose_kept(self._weights.topk(table.shape[1]).indices, places, len(kept), measurement.active)
        weights, chosen = route_selected(
            self._logits,
            selected,
            measurement.active,
            self._layer.rule,
            measurement.logits_space,
            bias=None if bias is None else bias[selected],
            chosen=fixed,
        )
        if self._layer.rule.scales_inputs:
            weights = torch.ones_like(weights)
        return torch.zeros_like(self._logits).scatter_add_(1, selected[chosen], weights)

    def _squares(self, weights: Tensor) -> float:
        """Squared norm of the layer's output with routing weights [tokens, n], summed over tokens."""
        sums = torch.bmm(self._products, weights.unsqueeze(2)).squeeze(2) * weights
        return max(0.0, float(sums.sum(dtype=torch.float64)))


def tries_all(experts: int, measurement: SubsetMeasurement) -> bool:
    """Return whether all subsets are tried, and not only those that dropping experts one by one leads to."""
    return comb(experts, measurement.retained) <= measurement.limit


def compare_subsets(samples: Sequence[SubsetSample], measurement: SubsetMeasurement) -> dict[str, Tensor]:
    """Compare subsets of experts on every MoE layer's complete sample.

    Returns:
        `subset_discrepancy` float32 [layers, C(n, n')], the discrepancies of all subsets in lexicographic order, if
        there are at most `measurement.limit`. Otherwise `subset_kept` int64 [groups, n'], the experts that remain after
        dropping the others one by one, each time with the least sum of discrepancies over a group's layers.
    """
    count = samples[0].count
    if tries_all(count, measurement):
        subsets, rows = list(combinations(range(count), measurement.retained)), []
        for sample in samples:
            with sample.loaded():
                rows.append([sample.discrepancy(kept) for kept in subsets])
        return {"subset_discrepancy": torch.tensor(rows)}
    groups = [
        [sample for sample, owner in zip(samples, measurement.layer_groups, strict=True) if owner == group]
        for group in range(max(measurement.layer_groups) + 1)
    ]
    return {"subset_kept": torch.tensor([_drop_one_by_one(group, measurement.retained) for group in groups])}


def _drop_one_by_one(samples: Sequence[SubsetSample], retained: int) -> list[int]:
    kept = list(range(samples[0].count))
    with ExitStack() as stack:
        for sample in samples:
            stack.enter_context(sample.loaded())
        while len(kept) > retained:
            rests = [[other for other in kept if other != expert] for expert in kept]
            kept = min(rests, key=lambda rest: sum(sample.discrepancy(rest) for sample in samples))
    return kept
