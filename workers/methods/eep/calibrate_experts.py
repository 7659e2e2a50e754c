"""Statistics of a MoE model's experts on calibration prompts, in one pass over the unedited model.

Each statistic names its source. Sequences run without padding. Routing weights are those that the family applies, so
they are rescaled if it rescales the top-k.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from moevolve.workers.contract.edits import Calibration, Tokens
from moevolve.workers.contract.facts import ModelFacts
from moevolve.workers.contract.methods import Resident
from moevolve.workers.families.layers import MoELayer
from moevolve.workers.methods.eep.edit import ExpertsRecipe
from moevolve.workers.methods.eep.expert_subsets import (
    ROWS_AT_ONCE,
    SAMPLED_AT_ONCE,
    RoutedTokens,
    SubsetSample,
    check_memory,
    compare_subsets,
    tries_all,
)
from moevolve.workers.methods.eep.neurons import ExpertNeurons


class Measure(Protocol):
    """One statistic of one layer."""

    def add(self, routed: RoutedTokens) -> None: ...

    def arrays(self) -> dict[str, Tensor]: ...


def calibrate_experts(resident: Resident, sequences: Sequence[Tokens], recipe: ExpertsRecipe) -> Calibration:
    """Measure every MoE layer's experts.

    Returns:
        Arrays whose first dimension is the MoE layers in order of depth:

        - `usage` gives `counts` int64 [layers, n], the number of tokens that chose each expert, and `soft_activation`
          float32 [layers, n], the sum over tokens of the softmax over all n experts.
        - `saliency` gives `saliency` float32 [layers, n].
        - `importance` gives `importance_sums` float32 [layers, n, 3, 3], the sums over an expert's tokens of the powers
          0, 1 and 2 of its routing weight times those of its output's norm. Sums over tokens add.
        - `pairs` gives `pair_norms` float64 [layers, n, n]: sums over tokens of the products of the norms of two
          experts' weighted outputs.
        - `mean_outputs` gives `output_distances` float32 [layers, n, n], Euclidean distances of mean outputs.
        - A comparison of subsets gives `subset_discrepancy` or `subset_kept`; see `compare_subsets`.

    Raises:
        UserError: A sample takes too much memory.
    """
    layers = resident.layers
    total = sum(len(each) for each in sequences)
    measures = [[_MEASURES[name](layer) for name in recipe.statistics] for layer in layers]
    subsets, samples = recipe.subsets, []
    if subsets is not None:
        check_memory(len(layers), layers[0].count, min(total, subsets.sample))
        samples = [SubsetSample(layer, subsets, total) for layer in layers]
    with ExitStack() as stack:
        for place, layer in enumerate(layers):
            hook = partial(_add_tokens, layer, [*measures[place], *samples[place : place + 1]])
            stack.callback(layer.gate.register_forward_hook(hook).remove)
        for row in resident.rows(sequences):
            resident.run(row)
    arrays: dict[str, Tensor] = {}
    for measure in zip(*measures, strict=True):
        found = [each.arrays() for each in measure]
        arrays |= {name: torch.stack([each[name].cpu() for each in found]) for name in found[0]}
    if subsets is not None:
        arrays |= compare_subsets(samples, subsets)
    return Calibration({name: array.numpy() for name, array in arrays.items()})


def _add_tokens(
    layer: MoELayer, measures: Sequence[Any], module: nn.Module, args: tuple[Any, ...], output: tuple[Tensor, ...]
) -> None:
    """Forward hook of a router: add the tokens that it routes to the layer's measures."""
    logits, weights, chosen = output
    hidden = layer.experts_input(args[0].reshape(-1, args[0].shape[-1]))
    routed = RoutedTokens(layer.experts, hidden, logits, weights, chosen)
    for measure in measures:
        measure.add(routed)


def measuring_bytes(recipe: ExpertsRecipe, facts: ModelFacts, hidden: int, row_bytes: int, longest: int) -> int:
    """Peak device memory of calibration besides the model, in bytes: experts' outputs, or samples of tokens.

    If subsets are found by dropping experts one by one, the samples of all layers of a group are loaded together.

    Args:
        recipe, facts: Settings of the calibration, and sizes of the model.
        hidden: Width of the residual stream.
        row_bytes: Bytes of activations in a layer per token and expert that the token runs.
        longest: Tokens of the longest sequence.
    """
    n, row, most = facts.experts, row_bytes + hidden * facts.dtype_bytes, 0
    if {"saliency", "importance", "pairs"} & set(recipe.statistics):
        most = min(ROWS_AT_ONCE, longest * facts.active) * (row + 8 * hidden)
    if "mean_outputs" in recipe.statistics:
        most = max(most, min(max(ROWS_AT_ONCE, n), longest * n) * row)
    if recipe.subsets is not None:
        tokens, subsets = min(recipe.subsets.sample, recipe.tokens), recipe.subsets
        outputs = min(SAMPLED_AT_ONCE, longest) * n * (row + 4 * (hidden + n))
        groups = subsets.layer_groups
        layers = 1 if tries_all(n, subsets) else max(groups.count(group) for group in set(groups))
        most = max(most, outputs, layers * tokens * n**2 * 4)
    return most


class _Usage:
    """How often experts are chosen, and the sum of their routing weights.

    Source: Efficient Expert Pruning (arXiv 2407.00945), App. A.2: activation frequency and soft activation. The paper
    calls softmax(W_G x) over all experts the routing weights (Sec. 3), so they are summed whether chosen or not.
    """

    def __init__(self, layer: MoELayer) -> None:
        self._counts = _zeros(layer, layer.count).long()
        self._soft = _zeros(layer, layer.count)
        self._rule = layer.rule

    def add(self, routed: RoutedTokens) -> None:
        self._counts += routed.chosen.flatten().bincount(minlength=len(self._counts))
        sigmoids = self._rule.scores in ("sigmoid", "sigmoid_of_chosen")
        scores = routed.logits.float().sigmoid() if sigmoids else routed.logits.float().softmax(dim=-1)
        self._soft += scores.sum(dim=0, dtype=torch.float64)

    def arrays(self) -> dict[str, Tensor]:
        return {"counts": self._counts, "soft_activation": self._soft.float()}


class _Saliency:
    """Mean over the tokens that chose an expert of its routing weight times the norm of its output; 0 without tokens.

    Source: REAP the Experts (arXiv 2510.13999), Sec. 4, the saliency criterion.
    """

    def __init__(self, layer: MoELayer) -> None:
        self._sums = _zeros(layer, layer.count)
        self._counts = _zeros(layer, layer.count)

    def add(self, routed: RoutedTokens) -> None:
        for outputs, weights, chosen in routed.chosen_outputs():
            weighted = (weights.double() * outputs.double().norm(dim=2)).flatten()
            # A product with one-hot rows is deterministic; `bincount` isn't on every device.
            one_hot = nn.functional.one_hot(chosen.flatten(), len(self._sums)).double()
            self._sums += weighted @ one_hot
            self._counts += one_hot.sum(dim=0)

    def arrays(self) -> dict[str, Tensor]:
        return {"saliency": (self._sums / self._counts.clamp_min(1)).float()}


class _Importance:
    """Sums over the tokens that chose an expert of powers of its routing weight and of its output's norm."""

    _POWERS = 3

    def __init__(self, layer: MoELayer) -> None:
        self._sums = _zeros(layer, layer.count, self._POWERS, self._POWERS)

    def add(self, routed: RoutedTokens) -> None:
        powers = torch.arange(self._POWERS, device=self._sums.device)
        for outputs, weights, chosen in routed.chosen_outputs():
            norms = outputs.double().norm(dim=2).flatten()[:, None] ** powers
            one_hot = nn.functional.one_hot(chosen.flatten(), len(self._sums)).double()
            products = (weights.double().flatten()[:, None] ** powers)[:, :, None] * norms[:, None, :]
            self._sums += (one_hot.t() @ products.flatten(1)).view_as(self._sums)

    def arrays(self) -> dict[str, Tensor]:
        return {"importance_sums": self._sums.float()}


class _Pairs:
    """Sums over tokens of the product of the norms of two chosen experts' weighted outputs; on the host."""

    def __init__(self, layer: MoELayer) -> None:
        self._norms = torch.zeros(layer.count, layer.count, dtype=torch.float64)

    def add(self, routed: RoutedTokens) -> None:
        for outputs, weights, found in routed.chosen_outputs():
            norms = (outputs.float() * weights.float()[:, :, None]).norm(dim=2)
            # Added up on the host, since adding by index isn't deterministic on every device.
            chosen = found.cpu()
            pairs = (chosen[:, :, None] * len(self._norms) + chosen[:, None, :]).flatten()
            products = norms[:, :, None] * norms[:, None, :]
            self._norms.view(-1).index_add_(0, pairs, products.cpu().double().flatten())

    def arrays(self) -> dict[str, Tensor]:
        return {"pair_norms": self._norms}


class _MeanOutputs:
    """Distances between the experts' mean outputs, with every expert run on every token.

    Source: HC-SMoE (arXiv 2410.08589), Sec. 3: similarity of experts is that of their outputs averaged over all tokens
    of the calibration data, independent of the routing.
    """

    def __init__(self, layer: MoELayer) -> None:
        # Experts may work on vectors of another width than the residual stream's.
        self._sums = _zeros(layer, layer.count, ExpertNeurons(layer.experts, layer.expert_tensors()).hidden)
        self._tokens = 0

    def add(self, routed: RoutedTokens) -> None:
        for rows in routed.chunks(len(self._sums)):
            self._sums += routed.run_all(rows).sum(dim=0, dtype=torch.float64)
        self._tokens += len(routed.hidden)

    def arrays(self) -> dict[str, Tensor]:
        means = self._sums / self._tokens
        distances = torch.cdist(means, means, compute_mode="donot_use_mm_for_euclid_dist")
        return {"output_distances": distances.float()}


def _zeros(layer: MoELayer, *shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.float64, device=layer.router_weight.device)


_MEASURES: dict[str, Callable[[MoELayer], Measure]] = {
    "usage": _Usage,
    "saliency": _Saliency,
    "mean_outputs": _MeanOutputs,
    "importance": _Importance,
    "pairs": _Pairs,
}
