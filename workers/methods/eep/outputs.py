"""The output projections of a MoE layer's edited experts, as the repair fits them: all experts of a layer at once.

A feature is a neuron of a kept or merged expert: its activation times the expert's routing weight, zero for tokens that
don't choose the expert. The neurons of a shared expert follow, whose activations no routing weight multiplies.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from moevolve.workers.families.layers import MoELayer
from moevolve.workers.methods.eep.edit import EepEdit
from moevolve.workers.methods.eep.experts import LayerExperts, SharedExpert
from moevolve.workers.methods.eep.neurons import ExpertNeurons, choose_neurons
from moevolve.workers.methods.eep.router import EditableRouter
from moevolve.workers.methods.shared.dense_outputs import CopyOnWriteWeights
from moevolve.workers.methods.shared.outputs import (
    BLOCK_COLUMNS,
    FeatureBlock,
    Features,
    Network,
    Recorded,
    padded,
    recording,
)

# Of more than twice as many tokens every second, third ... chooses neurons; the fit of the chosen ones takes all. With
# half as many, candidates of the demo's model that keep one expert per layer have 69.4 instead of 71.3 on `span`, a
# mean of three.
_CHOOSING_TOKENS = 8192


class ExpertOutputs:
    """All experts of one MoE layer, the `ordinal`-th, with an edit applied, as a `LayerOutput`.

    If the edit uses originals in place, `prepare` gets copies of them, which can be changed.
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
        self._layer, self._experts, self._shared, self._edit = layer, experts, shared, edit
        self._router, self._ordinal = router, ordinal

    def prepare(self, selects: bool) -> None:
        plan = self._router.plan
        assert plan is not None
        if plan.positions is not None:
            # The routing points at resident originals, which must not change.
            self._experts.use_selected(self._edit.expert_merging[self._ordinal].argmax(axis=1).tolist())
            self._router.plan = replace(plan, positions=None)
        if not selects or self._neurons().output_biases:  # which those of selected neurons keep
            self._experts.make_writable()
        if self._shared is not None:
            self._shared.load()  # before its weights are replaced

    @property
    def layer(self) -> int:
        return self._layer.index

    def recording(self) -> AbstractContextManager[list[Recorded]]:
        """Record inputs of the experts, routing weights, and chosen experts."""
        return recording(self._layer.gate, lambda hidden, routed: (hidden, routed[1], routed[2]))

    def features(self, recorded: Recorded) -> Features:
        hidden, weights, chosen = recorded
        return expert_features(self._neurons(), hidden, self._added(weights), chosen, self._shared)

    def add(self, columns: slice, change: Tensor) -> Tensor:
        shared = self._of_shared(columns)
        if shared is not None:
            return shared[0].add(shared[1], change)
        down = self._down(columns)
        before = down.to(torch.float32, copy=True)
        down.copy_(before + change)
        return down.float() - before

    def weights(self, columns: slice) -> Tensor:
        shared = self._of_shared(columns)
        return self._down(columns) if shared is None else shared[0].part(shared[1])

    def use(self, columns: slice, weights: Tensor) -> None:
        shared = self._of_shared(columns)
        if shared is None:
            self._down(columns).copy_(weights)
        else:
            shared[0].use(shared[1], weights)

    def _of_shared(self, columns: slice) -> tuple[CopyOnWriteWeights, slice] | None:
        """Return the shared expert's weights and its own columns, if the columns are its."""
        if self._shared is None or columns.start < self._routed:
            return None
        return self._shared.weights, slice(columns.start - self._routed, columns.stop - self._routed)

    def _down(self, columns: slice) -> Tensor:
        """A view of the output weights of some columns of the features, neurons of one expert: [columns, hidden]."""
        neurons = self._neurons()
        expert, start = divmod(columns.start, neurons.width)
        return neurons.down(expert)[start : start + columns.stop - columns.start]

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

    def experts_output(self, recorded: Recorded, features: Features) -> Tensor:
        hidden, weights, chosen = recorded
        given = torch.zeros(hidden.shape, dtype=torch.float32, device=hidden.device)
        for block in features.blocks:
            if block.columns.start < self._routed:
                block.add_to(given, self._down(block.columns))
        for name in self._neurons().output_biases:
            for place in range(chosen.shape[1]):
                given += self._added(weights)[:, place, None] * self._layer.expert_tensors()[name][chosen[:, place]]
        return given

    def select_neurons(self, recorded: Recorded, token_weights: Tensor | None) -> Tensor:
        hidden, weights, chosen = recorded
        neurons, retained = self._original_neurons(), self._edit.retained
        original = self._layer.route(hidden)
        width = self._edit.width or neurons.width
        some = slice(None, None, max(1, len(hidden) // _CHOOSING_TOKENS))
        routings = (original[1][some], original[2][some]), (weights[some], chosen[some])
        token_weights = None if token_weights is None else token_weights[some]
        ids = choose_neurons(neurons, hidden[some], *routings, retained, width, token_weights)
        self.use_neurons(ids)
        return ids

    def use_neurons(self, neurons: Tensor) -> None:
        self._experts.use_buffer(*neurons.shape)
        self._neurons().copy_from(self._original_neurons(), neurons)
        if self._shared is not None:
            self._shared.weights.restore()

    def _added(self, weights: Tensor) -> Tensor:
        """Routing weights times the factor with which the layer adds its experts' sum to the residual stream."""
        return weights if self._layer.output_scale == 1 else weights * self._layer.output_scale

    def _neurons(self) -> ExpertNeurons:
        return ExpertNeurons(self._layer.experts, self._layer.expert_tensors())

    def _original_neurons(self) -> ExpertNeurons:
        return ExpertNeurons(self._layer.experts, self._experts.originals)


def expert_features(
    neurons: ExpertNeurons, hidden: Tensor, weights: Tensor, chosen: Tensor, shared: SharedExpert | None
) -> Features:
    """Return the features whose columns are the experts' neurons, expert by expert, then the shared expert's, if any.

    Args:
        neurons: Neurons of the layer's n' experts.
        hidden: Inputs of the experts, [tokens, hidden].
        weights: Routing weights of the chosen experts, [tokens, k].
        chosen: The chosen experts, int64 [tokens, k].
        shared: The layer's shared expert.
    """
    width, routed = neurons.width, neurons.count * neurons.width
    blocks: list[FeatureBlock] = []
    for expert in range(neurons.count):
        tokens, place = (chosen == expert).nonzero(as_tuple=True)
        if not len(tokens):
            continue
        rows, ranks = (padded(each, hidden, min(width, BLOCK_COLUMNS)) for each in (tokens, place))
        inputs, scales = hidden.index_select(0, rows), weights[rows, ranks].float()[:, None]
        for part in torch.arange(width, device=hidden.device).split(BLOCK_COLUMNS):
            start = expert * width + int(part[0])
            values = neurons.features(expert, part, inputs, scales)
            blocks.append(FeatureBlock(slice(start, start + len(part)), tokens, values))
    if shared is not None:
        every = torch.arange(len(hidden), device=hidden.device)
        for part in torch.arange(shared.width).split(BLOCK_COLUMNS):
            own = slice(int(part[0]), int(part[0]) + len(part))
            columns = slice(routed + own.start, routed + own.stop)
            blocks.append(FeatureBlock(columns, every, shared.activations(hidden, own)))
    return Features(routed + (0 if shared is None else shared.width), blocks)
