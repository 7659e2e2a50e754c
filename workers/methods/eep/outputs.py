"""What a repair fits of edited experts: the output projections of all experts of a layer at once.

A feature is a neuron of a kept or merged expert, its activation times the expert's routing weight, and zero where a
token doesn't choose the expert.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from moevolve.workers.families.layers import MoELayer
from moevolve.workers.methods.eep.edit import EepEdit
from moevolve.workers.methods.eep.elimination import eliminate_neurons
from moevolve.workers.methods.eep.experts import LayerExperts
from moevolve.workers.methods.eep.neurons import ExpertNeurons, choose_neurons
from moevolve.workers.methods.eep.router import EditableRouter
from moevolve.workers.methods.fitting import NeuronRecipe
from moevolve.workers.methods.outputs import FeatureBlock


class ExpertOutputs:
    """See `LayerOutput`: of one MoE layer.

    Args:
        layer: its handle.
        router, experts: as the edit has them; the experts become the edit's own.
        edit: that is on the model.
        ordinal: number of the layer among the MoE layers.
    """

    def __init__(
        self, layer: MoELayer, router: EditableRouter, experts: LayerExperts, edit: EepEdit, ordinal: int
    ) -> None:
        self._layer, self._router, self._experts, self._edit = layer, router, experts, edit
        assert router.plan is not None
        if router.plan.slots is not None:
            # The routing points at resident originals, which must stay as they are.
            experts.show_selected(edit.expert_merging[ordinal].argmax(axis=1).tolist(), edit.alignment)
            router.plan = replace(router.plan, slots=None)

    next_part = None

    @property
    def layer(self) -> int:
        return self._layer.index

    @contextmanager
    def watching(self) -> Iterator[list[tuple[Tensor, ...]]]:
        found: list[tuple[Tensor, ...]] = []

        def keep(module: nn.Module, args: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
            found.append((args[0].reshape(-1, args[0].shape[-1]), output[1], output[2]))

        handle = self._layer.gate.register_forward_hook(keep)
        try:
            yield found
        finally:
            handle.remove()

    def features(self, seen: tuple[Tensor, ...]) -> ExpertFeatures:
        hidden, weights, chosen = seen
        neurons = ExpertNeurons(self._layer.experts, self._layer.expert_tensors())
        return ExpertFeatures(neurons, self._edit.retained, hidden, weights, chosen)

    def add(self, columns: slice, change: Tensor) -> Tensor:
        neurons = ExpertNeurons(self._layer.experts, self._layer.expert_tensors())
        expert, start = divmod(columns.start, neurons.width)
        down = neurons.down(expert)[start : start + len(change)]
        before = down.to(torch.float32, copy=True)
        down.copy_(before + change)
        return down.float() - before

    def recombine(self, seen: tuple[Tensor, ...], recipe: NeuronRecipe, memory: int) -> Tensor:
        hidden, weights, chosen = seen
        self._experts.arrange(None)
        neurons = ExpertNeurons(self._layer.experts, self._experts.originals)
        whole = self._router.inner(hidden)
        return choose_neurons(
            neurons, hidden, (whole[1], whole[2]), (weights, chosen), self._edit.retained, recipe, memory
        )

    def eliminate(
        self,
        seen: tuple[Tensor, ...],
        ids: Tensor,
        missing: Tensor,
        fitted: Tensor,
        strength: float,
        recipe: NeuronRecipe,
        memory: int,
    ) -> Tensor:
        hidden, weights, chosen = (each[fitted] for each in seen)
        self._experts.arrange(None)
        source = ExpertNeurons(self._layer.experts, self._experts.originals)
        now = ExpertNeurons(self._layer.experts, self._layer.expert_tensors())
        routed = (weights, chosen)
        return eliminate_neurons(source, now, ids, hidden, routed, missing[fitted], strength, recipe, memory)

    def fill(self, ids: Tensor) -> None:
        self._experts.arrange(None)
        originals = ExpertNeurons(self._layer.experts, self._experts.originals)
        ExpertNeurons(self._layer.experts, self._layer.expert_tensors()).take(originals, ids)

    @contextmanager
    def unedited(self) -> Iterator[None]:
        plan = self._router.plan
        with self._experts.set_aside():
            try:
                self._router.plan = None
                yield
            finally:
                self._router.plan = plan


@dataclass(frozen=True, slots=True, eq=False)
class ExpertFeatures:
    """See `Features`: columns are the experts' neurons, expert by expert.

    Attributes:
        neurons: of the layer's experts.
        count: experts.
        hidden: what goes into them, [tokens, hidden].
        weights: the chosen experts' routing weights, [tokens, k].
        chosen: which they are, int64 [tokens, k].
    """

    neurons: ExpertNeurons
    count: int
    hidden: Tensor
    weights: Tensor
    chosen: Tensor

    @property
    def width(self) -> int:
        return self.count * self.neurons.width

    def blocks(self, memory: int) -> Iterator[FeatureBlock]:
        width = self.neurons.width
        for expert in range(self.count):
            tokens, place = (self.chosen == expert).nonzero(as_tuple=True)
            if not len(tokens):
                continue
            hidden, weights = self.hidden[tokens], self.weights[tokens, place].float()[:, None]
            # Gate, up and their product, once more in float32, ordered, times each other; and rows of the weights.
            step = max(1, (memory - hidden.nbytes) // (28 * (len(tokens) + self.hidden.shape[1])))
            for start in range(0, width, step):
                part = slice(start, min(start + step, width))
                values = self.neurons.activations(expert, torch.arange(part.start, part.stop), hidden).float() * weights
                yield FeatureBlock(slice(expert * width + part.start, expert * width + part.stop), tokens, values)
