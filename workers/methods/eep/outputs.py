"""The output projections of a MoE layer's edited experts, as the repair fits them: all experts of a layer at once.

A feature is a neuron of a kept or merged expert: its activation times the expert's routing weight, zero for tokens that
don't choose the expert. The neurons of a shared expert follow, whose activations no routing weight multiplies.

If kept experts take neurons of all experts, their router rows are fitted first: a kept expert takes over the work of a
group of experts, so a token should choose and weigh it as it did the group. Experts that tokens choose together go to
different groups, since all neurons of a kept expert share one routing weight. The kept expert's logit is then fitted to
the logarithm of its group's routing mass, `log sum over e in group of softmax(l)_e`, by ridge regression. That needs an
edit that picks rows of a softmax router: rows are fitted up to a constant per token, which changes what others choose.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moevolve.workers.families.layers import MoELayer
from moevolve.workers.methods.eep.edit import EepEdit
from moevolve.workers.methods.eep.experts import LayerExperts, SharedExpert
from moevolve.workers.methods.eep.neurons import ExpertNeurons, choose_neurons
from moevolve.workers.methods.eep.router import EditableRouter, RatioHistogram, Routing
from moevolve.workers.methods.shared.outputs import (
    FeatureBlock,
    Features,
    Network,
    NeuronSelection,
    Recorded,
    choosing,
    recording,
)

# Lower bound on a group's routing mass: how far below it lies isn't worth fitting.
_LEAST_MASS = 1e-6
# Ridge strength of router rows as a multiple of the mean square of an input, summed over tokens.
_ROWS_LAMBDA = 1e-3
# Rows of a float32 product that are added to a float64 sum at once.
_PRODUCT_ROWS = 1024


class ExpertOutputs:
    """All experts of one MoE layer, the `ordinal`-th, with an edit applied, as a `LayerOutput`.

    If the edit uses originals in place, it gets copies of them here, which can be changed.
    """

    next_part = None

    def __init__(
        self,
        layer: MoELayer,
        router: EditableRouter,
        experts: LayerExperts,
        shared: SharedExpert | None,
        edit: EepEdit,
        ordinal: int,
    ) -> None:
        self._layer, self._router, self._experts, self._shared, self._edit = layer, router, experts, shared, edit
        self._ordinal = ordinal
        assert router.plan is not None
        if router.plan.positions is not None:
            # The routing points at resident originals, which must not change.
            experts.use_selected(edit.expert_merging[ordinal].argmax(axis=1).tolist())
            router.plan = replace(router.plan, positions=None)
        experts.make_writable()

    @property
    def layer(self) -> int:
        return self._layer.index

    def recording(self) -> AbstractContextManager[list[Recorded]]:
        """Record inputs of the experts, routing weights, and chosen experts."""
        return recording(self._layer.gate, lambda hidden, routed: (hidden, routed[1], routed[2]))

    def features(self, recorded: Recorded) -> ExpertFeatures:
        hidden, weights, chosen = recorded
        return ExpertFeatures(self._neurons(), hidden, self._added(weights), chosen, self._shared)

    def add(self, columns: slice, change: Tensor) -> Tensor:
        if self._shared is not None and columns.start >= self._routed:
            self._shared.make_writable()
        down = self._down(columns)
        before = down.to(torch.float32, copy=True)
        down.copy_(before + change)
        return down.float() - before

    def _down(self, columns: slice) -> Tensor:
        """A view of the output weights of some columns of the features, [columns, hidden]."""
        neurons, count = self._neurons(), columns.stop - columns.start
        if columns.start >= self._routed:
            assert self._shared is not None
            return self._shared.weights[columns.start - self._routed :][:count]
        expert, start = divmod(columns.start, neurons.width)
        return neurons.down(expert)[start : start + count]

    def networks(self, recorded: Recorded) -> Iterator[Network]:
        hidden, weights, chosen = recorded
        neurons, added = self._neurons(), self._added(weights).float()
        for expert in range(neurons.count):
            tokens, place = (chosen == expert).nonzero(as_tuple=True)
            yield neurons.network(expert, tokens, hidden[tokens], added[tokens, place][:, None])

    def inputs(self) -> list[Tensor]:
        neurons = self._neurons()
        return [neurons.gate_up(expert) for expert in range(neurons.count)]

    def use_inputs(self, weights: Sequence[Tensor]) -> None:
        for present, weight in zip(self.inputs(), weights, strict=True):
            present.copy_(weight)

    @property
    def _routed(self) -> int:
        """Number of features that are neurons of routed experts."""
        return self._edit.retained * self._neurons().width

    @contextmanager
    def without_experts(self) -> Iterator[None]:
        experts: Any = self._layer.experts
        before = experts.__dict__.get("forward")  # of an instance, which hides its class's
        experts.forward = lambda hidden, *_args: torch.zeros_like(hidden)
        try:
            yield
        finally:
            del experts.forward
            if before is not None:
                experts.forward = before

    def experts_output(self, recorded: Recorded, features: Features, memory: int) -> Tensor:
        hidden, weights, chosen = recorded
        given = torch.zeros(hidden.shape, dtype=torch.float32, device=hidden.device)
        for block in features.blocks(memory):
            if block.columns.start < self._routed:
                block.add_to(given, self._down(block.columns).float())
        for name in self._neurons().output_biases:
            for place in range(chosen.shape[1]):
                given += self._added(weights)[:, place, None] * self._layer.expert_tensors()[name][chosen[:, place]]
        return given

    def select_neurons(
        self, recorded: Recorded, token_weights: Tensor, memory: int
    ) -> tuple[NeuronSelection, Recorded]:
        hidden, weights, chosen = recorded
        neurons, retained = self._original_neurons(), self._edit.retained
        original = self._layer.route(hidden)
        width = neurons.width if self._edit.widths is None else self._edit.widths[self._ordinal]
        rows = self._fitted_rows(hidden, original)
        skip_below = None
        if rows is not None:
            skip_below = self._skip_threshold(*rows, hidden)
            self._route_by(*rows, skip_below)
            _, weights, chosen = self._router(hidden)
        some = choosing(len(hidden))
        routings = (original[1][some], original[2][some]), (weights[some], chosen[some])
        ids = choose_neurons(neurons, hidden[some], *routings, retained, width, memory, token_weights[some])
        selection = NeuronSelection(ids, rows, skip_below)
        self.use_neurons(selection)
        return selection, (hidden, weights, chosen)

    def use_neurons(self, selection: NeuronSelection) -> None:
        self._experts.use_buffer(*selection.neurons.shape)
        self._neurons().copy_from(self._original_neurons(), selection.neurons)
        if self._shared is not None:
            self._shared.reset()
        if selection.rows is not None:
            self._route_by(*selection.rows, selection.skip_below)

    def _added(self, weights: Tensor) -> Tensor:
        """Routing weights times the factor with which the layer adds its experts' sum to the residual stream."""
        return weights if self._layer.output_scale == 1 else weights * self._layer.output_scale

    def _neurons(self) -> ExpertNeurons:
        return ExpertNeurons(self._layer.experts, self._layer.expert_tensors())

    def _original_neurons(self) -> ExpertNeurons:
        return ExpertNeurons(self._layer.experts, self._experts.originals)

    def _fitted_rows(self, hidden: Tensor, original: Routing) -> tuple[Tensor, Tensor | None] | None:
        """Router rows for groups of experts around each kept one; None if the router can't have new rows."""
        plan, rule = self._router.plan, self._router.rule
        assert plan is not None
        picks_rows = plan.selected is not None and self._edit.router_folds(rule) and self._edit.retained > 1
        shifts = rule.scores in ("softmax", "softmax_of_chosen") and rule.groups.count == 1 and plan.correction is None
        if not (picks_rows and shifts):
            return None
        logits, weights, chosen = original
        shares = torch.zeros_like(logits, dtype=torch.float32).scatter_(1, chosen, weights.float())
        together: NDArray[np.float64] = (shares.t() @ shares).double().cpu().numpy()
        kept = self._edit.router_mapping[self._ordinal].argmax(axis=1).tolist()
        bias = self._layer.router_bias
        groups, weight = group_experts(together, kept), self._layer.router_weight[kept]
        return fit_rows(hidden, logits, groups, weight, None if bias is None else bias[kept])

    def _skip_threshold(self, weight: Tensor, bias: Tensor | None, hidden: Tensor) -> float | None:
        """Threshold of dynamic skipping with these router rows; None if the edit skips nothing."""
        assert self._router.plan is not None
        if self._router.plan.skip_below is None:
            return None
        self._route_by(weight, bias, None)
        _, weights, _ = self._router.route_to_kept(self._router.plan, hidden)
        ratios = RatioHistogram(weights.device)
        ratios.add(weights)
        return ratios.median()

    @torch.inference_mode(False)  # rows may become exported parameters, which inference tensors can't
    def _route_by(self, weight: Tensor, bias: Tensor | None, skip_below: float | None) -> None:
        assert self._router.plan is not None
        self._router.plan = replace(
            self._router.plan,
            selected=None,
            folded=weight.clone(),
            folded_bias=None if bias is None else bias.clone(),
            logits_space=True,
            skip_below=skip_below,
        )


@dataclass(frozen=True, slots=True, eq=False)
class ExpertFeatures:
    """`Features` whose columns are the experts' neurons, expert by expert, then those of the shared expert, if any.

    Attributes:
        neurons: Neurons of the layer's n' experts.
        hidden: Inputs of the experts, [tokens, hidden].
        weights: Routing weights of the chosen experts, [tokens, k].
        chosen: The chosen experts, int64 [tokens, k].
    """

    neurons: ExpertNeurons
    hidden: Tensor
    weights: Tensor
    chosen: Tensor
    shared: SharedExpert | None

    @property
    def width(self) -> int:
        return self.neurons.count * self.neurons.width + (0 if self.shared is None else self.shared.width)

    def blocks(self, memory: int) -> Iterator[FeatureBlock]:
        width = self.neurons.width
        for expert in range(self.neurons.count):
            tokens, place = (self.chosen == expert).nonzero(as_tuple=True)
            if not len(tokens):
                continue
            hidden, weights = self.hidden.index_select(0, tokens), self.weights[tokens, place].float()[:, None]
            # Per neuron: gate, up, their product, the features in float32, sorted, and multiplied with each other, for
            # every token; and a row of weights.
            step = max(1, (memory - hidden.nbytes) // (28 * (len(tokens) + self.hidden.shape[1])))
            for part in torch.arange(width).split(step):
                start = expert * width + int(part[0])
                values = self.neurons.features(expert, part, hidden, weights)
                yield FeatureBlock(slice(start, start + len(part)), tokens, values)
        if self.shared is not None:
            yield from self._shared_blocks(self.shared, memory)

    def _shared_blocks(self, shared: SharedExpert, memory: int) -> Iterator[FeatureBlock]:
        first, every = (
            self.neurons.count * self.neurons.width,
            torch.arange(len(self.hidden), device=self.hidden.device),
        )
        # Per neuron, for every token: the features in float32, sorted, and multiplied with each other.
        step = max(1, memory // (12 * (len(every) + self.hidden.shape[1])))
        for start in range(0, shared.width, step):
            part = slice(start, min(start + step, shared.width))
            values = shared.activations(self.hidden, part)
            yield FeatureBlock(slice(first + part.start, first + part.stop), every, values)


def group_experts(together: NDArray[np.float64], kept: Sequence[int]) -> NDArray[np.int64]:
    """Group experts so that those of a group are seldom chosen together, by greedy moves of single experts.

    `together` has the products of two experts' routing weights, summed over tokens, [n, n]; no move lowers its sum
    within groups. The experts in `kept` stay in groups 0 to n' - 1, in this order. Returns every expert's group, [n].
    """
    count, fixed = len(together), np.array(kept)
    between = together * (1 - np.eye(count))
    groups = np.full(count, -1, dtype=np.int64)
    groups[fixed] = np.arange(len(fixed))
    # Column g sums `between` over the members of group g.
    common = between[:, fixed]
    for expert in np.argsort(-np.diagonal(together), kind="stable"):
        if groups[expert] < 0:
            groups[expert] = int(common[expert].argmin())
            common[:, groups[expert]] += between[:, expert]
    # Updated sums differ from fresh ones in their last digits: a gain of that size could make moves go round for ever.
    least = 1e-9 * float(between.sum())
    while True:
        gains = common[np.arange(count), groups][:, None] - common
        gains[fixed] = 0
        expert, group = divmod(int(gains.argmax()), len(fixed))
        if gains[expert, group] <= least:
            return groups
        common[:, groups[expert]] -= between[:, expert]
        common[:, group] += between[:, expert]
        groups[expert] = group


def fit_rows(
    hidden: Tensor, logits: Tensor, groups: NDArray[np.int64], weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor | None] | None:
    """Fit router rows whose logits are the logarithms of groups' routing mass, up to a constant per token.

    Args:
        hidden: Inputs of the router, [tokens, hidden].
        logits: Logits of the unedited router, [tokens, n].
        groups: Group of every expert, [n], with no group from 0 to n' - 1 empty.
        weight, bias: Rows that the ridge regression shrinks to, one per group, [n', hidden] and [n'].

    Returns:
        Weight and bias in the form of those given. None if inputs are not finite.
    """
    members = torch.nn.functional.one_hot(torch.from_numpy(groups)).to(logits.device, torch.float32)
    start = _centred(weight.float(), 0)
    inputs = hidden.float()
    if bias is not None:
        inputs = torch.cat((inputs, inputs.new_ones(len(inputs), 1)), dim=1)
        start = torch.cat((start, _centred(bias.float(), 0)[:, None]), dim=1)
    width = inputs.shape[1]
    gram = inputs.new_zeros(width, width, dtype=torch.float64)
    right = inputs.new_zeros(width, len(start), dtype=torch.float64)
    for rows, scores in zip(inputs.split(_PRODUCT_ROWS), logits.split(_PRODUCT_ROWS), strict=True):
        mass = torch.softmax(scores.float(), dim=-1) @ members
        residual = _centred(mass.clamp_min(_LEAST_MASS).log(), 1) - rows @ start.t()
        gram += rows.t() @ rows
        right += rows.t() @ residual
    gram.diagonal().add_(_ROWS_LAMBDA * float(gram.diagonal().mean()))
    factor, failed = torch.linalg.cholesky_ex(gram)
    if int(failed):
        return None
    fitted = start + torch.cholesky_solve(right, factor).t().float()
    fitted_weight = fitted[:, : weight.shape[1]].to(weight.dtype)
    return fitted_weight, None if bias is None else fitted[:, -1].to(bias.dtype)


def _centred(values: Tensor, dim: int) -> Tensor:
    return values - values.mean(dim=dim, keepdim=True)
