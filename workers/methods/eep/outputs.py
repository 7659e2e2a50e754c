"""What a repair fits of edited experts: the output projections of all experts of a layer at once.

A feature is a neuron of a kept or merged expert, its activation times the expert's routing weight, and zero where a
token doesn't choose the expert.

Where slots are filled with neurons of all experts, their router rows are fitted first, if the recipe says so and there
are such: the edit picks rows of a router that takes the softmax over all experts, and exports keep no other rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from moevolve.workers.contract.fitting import NeuronRecipe
from moevolve.workers.families.layers import MoELayer
from moevolve.workers.methods.eep.edit import EepEdit
from moevolve.workers.methods.eep.elimination import eliminate_neurons
from moevolve.workers.methods.eep.experts import LayerExperts
from moevolve.workers.methods.eep.neurons import ExpertNeurons, choose_neurons
from moevolve.workers.methods.eep.router import EditableRouter, Routing
from moevolve.workers.methods.eep.skipping import Ratios
from moevolve.workers.methods.eep.slot_rows import fit_rows, group_experts
from moevolve.workers.methods.shared.outputs import FeatureBlock, NeuronSelection


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
        self._ordinal = ordinal
        assert router.plan is not None
        if router.plan.slots is not None:
            # The routing points at resident originals, which must stay as they are.
            experts.show_selected(edit.expert_merging[ordinal].argmax(axis=1).tolist())
            router.plan = replace(router.plan, slots=None)
        experts.settle()

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

    def recombine(self, seen: tuple[Tensor, ...], recipe: NeuronRecipe, memory: int) -> NeuronSelection:
        hidden, weights, chosen = seen
        neurons = ExpertNeurons(self._layer.experts, self._experts.originals)
        whole = self._router.inner(hidden)
        retained = self._edit.retained
        width = recipe.widths(len(self._edit.expert_merging), neurons.count, retained, neurons.width)[self._ordinal]
        rows = self._fitted_rows(hidden, whole) if recipe.router == "fitted" else None
        skip_below = None
        if rows is not None:
            skip_below = self._threshold(*rows, hidden)
            self._route_by(*rows, skip_below)
            _, weights, chosen = self._router(hidden)
        ids = choose_neurons(neurons, hidden, (whole[1], whole[2]), (weights, chosen), retained, width, recipe, memory)
        filling = NeuronSelection(ids, rows, skip_below)
        self.fill(filling)
        return filling

    def eliminate(
        self,
        seen: tuple[Tensor, ...],
        filling: NeuronSelection,
        missing: Tensor,
        fitted: Tensor,
        ridge_lambda: float,
        recipe: NeuronRecipe,
        memory: int,
    ) -> NeuronSelection:
        hidden, weights, chosen = (each[fitted] for each in seen)
        source = ExpertNeurons(self._layer.experts, self._experts.originals)
        now = ExpertNeurons(self._layer.experts, self._layer.expert_tensors())
        ids, routed = filling.neurons, (weights, chosen)
        ids = eliminate_neurons(source, now, ids, hidden, routed, missing[fitted], ridge_lambda, recipe, memory)
        return replace(filling, neurons=ids)

    def fill(self, filling: NeuronSelection) -> None:
        originals = ExpertNeurons(self._layer.experts, self._experts.originals)
        self._experts.show_room(*filling.neurons.shape)
        ExpertNeurons(self._layer.experts, self._layer.expert_tensors()).take(originals, filling.neurons)
        if filling.rows is not None:
            self._route_by(*filling.rows, filling.skip_below)

    def _fitted_rows(self, hidden: Tensor, whole: Routing) -> tuple[Tensor, Tensor | None] | None:
        """Router rows for groups of experts with a kept one in each; None where there are none to fit."""
        plan, rule = self._router.plan, self._router.rule
        assert plan is not None
        picked = plan.selected is not None and self._edit.router_folds(rule) and self._edit.retained > 1
        if not picked or rule.scores == "sigmoid" or rule.groups.count > 1 or plan.correction is not None:
            return None
        logits, weights, chosen = whole
        shares = torch.zeros_like(logits, dtype=torch.float32).scatter_(1, chosen, weights.float())
        together: NDArray[np.float64] = (shares.t() @ shares).double().cpu().numpy()
        kept = self._edit.router_mapping[self._ordinal].argmax(axis=1).tolist()
        bias = self._layer.router_bias
        return fit_rows(
            hidden,
            logits,
            group_experts(together, kept),
            self._layer.router_weight[kept],
            None if bias is None else bias[kept],
        )

    def _threshold(self, weight: Tensor, bias: Tensor | None, hidden: Tensor) -> float | None:
        """Of dynamic skipping, with these rows; None where nothing is skipped."""
        assert self._router.plan is not None
        if self._router.plan.skip_below is None:
            return None
        self._route_by(weight, bias, None)
        _, weights, _ = self._router.choose(self._router.plan, hidden)
        ratios = Ratios(weights.device)
        ratios.add(weights)
        return ratios.median()

    @torch.inference_mode(False)  # rows may become exported parameters, which no inference tensor can
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
