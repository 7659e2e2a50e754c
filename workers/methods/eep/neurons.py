"""The neurons of a layer's experts, whatever form the family gives them, and filling slots with those of all experts.

A slot is an expert that is kept as a router row. Its neurons are chosen among those of all experts of the layer by what
they do for the tokens that the edited router sends to the slot, so a kept row can bring together what several experts
did for its tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from moevolve.workers.contract.fitting import NeuronRecipe


@dataclass(frozen=True, slots=True)
class ExpertNeurons:
    """Fused experts, neuron by neuron.

    Attributes:
        module: the family's. `transformers` notes the form at its class: whether matrices are transposed, gates and ups
            concatenated, and whether there are biases.
        tensors: the fused tensors by name; not always those that the module runs on.
    """

    module: Any = field(repr=False)
    tensors: Mapping[str, Tensor] = field(repr=False)

    @property
    def count(self) -> int:
        """Experts."""
        return len(self.tensors["down_proj"])

    @property
    def width(self) -> int:
        """Neurons I of an expert."""
        # By shape, since a layer whose experts are elsewhere shows none.
        return int(self.tensors["down_proj"].shape[1 if self._transposed else 2])

    def down(self, expert: int) -> Tensor:
        """A view of an expert's output projection, [I, hidden]."""
        down = self.tensors["down_proj"].data[expert]
        return down if self._transposed else down.t()

    def into(self, expert: int) -> Tensor:
        """A view of an expert's gates and ups, [2I, hidden]."""
        fused = self.tensors["gate_up_proj"].data[expert]
        return fused.t() if self._transposed else fused

    def rows(self, neurons: Tensor) -> Tensor:
        """Which rows of gates and ups neurons [count] have: all gates first, or each before its up; [2 count]."""
        if getattr(self.module, "is_concatenated", True):
            return torch.cat((neurons, neurons + self.width))
        return torch.stack((2 * neurons, 2 * neurons + 1), dim=1).flatten()

    @property
    def output_biases(self) -> tuple[str, ...]:
        """Names of tensors that have nothing of single neurons."""
        return ("down_proj_bias",) if self._biased else ()

    def shapes(self, count: int, width: int) -> dict[str, tuple[int, ...]]:
        """Of the tensors that `count` experts of `width` neurons have in this form, by name."""
        hidden = self.down(0).shape[1]
        into, out = (count, 2 * width, hidden), (count, hidden, width)
        if self._transposed:
            into, out = (count, hidden, 2 * width), (count, width, hidden)
        shapes: dict[str, tuple[int, ...]] = {"gate_up_proj": into, "down_proj": out}
        if self._biased:
            shapes |= {"gate_up_proj_bias": (count, 2 * width), "down_proj_bias": (count, hidden)}
        return shapes

    def activations(self, expert: int, neurons: Tensor, hidden: Tensor) -> Tensor:
        """Of neurons [count] of an expert on hidden states [tokens, hidden], in their dtype: [tokens, count]."""
        rows = self.rows(neurons)
        bias = self.tensors["gate_up_proj_bias"].data[expert][rows].to(hidden.device) if self._biased else None
        gate_up = nn.functional.linear(hidden, self.into(expert)[rows].to(hidden.device), bias)
        activations: Tensor = self.module._apply_gate(gate_up)  # noqa: SLF001 - how `transformers` names it
        return activations

    def take(self, source: ExpertNeurons, ids: Tensor) -> None:
        """Fill every expert with neurons of others; output biases stay.

        Args:
            source: whose neurons.
            ids: int64 [experts, I], neuron j of the source's expert e as `e * J + j` where that one has J neurons.
        """
        for slot, row in enumerate(ids):
            for expert in (row // source.width).unique().tolist():
                here = (row // source.width == expert).nonzero()[:, 0]
                there = (row[here] % source.width).to(source.tensors["down_proj"].device)
                here = here.to(self.tensors["down_proj"].device)
                _put(self.down(slot), here, source.down(expert), there)
                to, of = self.rows(here), source.rows(there)
                _put(self.into(slot), to, source.into(expert), of)
                if self._biased:
                    name = "gate_up_proj_bias"
                    _put(self.tensors[name].data[slot], to, source.tensors[name].data[expert], of)

    @property
    def _transposed(self) -> bool:
        return bool(getattr(self.module, "is_transposed", False))

    @property
    def _biased(self) -> bool:
        return bool(getattr(self.module, "has_bias", False))


def _put(target: Tensor, to: Tensor, source: Tensor, of: Tensor) -> None:
    target[to] = source[of].to(target.device)


Chosen = tuple[Tensor, Tensor]
"""Routing weights [tokens, k] and which experts they are of, int64 [tokens, k]."""


def choose_neurons(
    neurons: ExpertNeurons,
    hidden: Tensor,
    whole: Chosen,
    edited: Chosen,
    slots: int,
    size: int,
    recipe: NeuronRecipe,
    memory: int,
) -> Tensor:
    """Which neurons of all experts fill the slots.

    For slot s, neuron j of expert e is worth `sum over tokens of w_s^a |g_e h_ej|^b`, times `|down_ej|^c`, where `w_s`
    is the slot's routing weight, zero for tokens that aren't sent to it, `g_e` the unedited router's, and `h_ej` the
    neuron's activation.

    Args:
        neurons: of all n experts.
        hidden: what goes into the layer's experts, [tokens, hidden].
        whole: how the unedited router routes it.
        edited: how the edited one does, by slot.
        slots: n'.
        size: neurons of a slot.
        recipe: the exponents, and whether slots may share neurons.
        memory: bytes that activations may take.

    Returns:
        int64 [n', size], neuron j of expert e as `e * I + j`, in ascending order.
    """
    width = neurons.width
    shares = hidden.new_zeros(len(hidden), slots, dtype=torch.float32)
    shares.scatter_(1, edited[1], edited[0].float().abs().pow(recipe.routing))
    worth = torch.zeros(slots, neurons.count * width, dtype=torch.float64, device=hidden.device)
    for expert in range(neurons.count):
        tokens, place = (whole[1] == expert).nonzero(as_tuple=True)
        weights, sent = whole[0][tokens, place].float()[:, None], shares[tokens]
        step = max(1, memory // (20 * (len(tokens) + hidden.shape[1])))
        for part in torch.arange(width).split(step):
            used = (neurons.activations(expert, part, hidden[tokens]).float() * weights).abs().pow(recipe.activation)
            lengths = neurons.down(expert)[part].to(hidden.device).float().norm(dim=1).pow(recipe.output)
            worth[:, expert * width + part.to(worth.device)] = ((sent.t() @ used) * lengths).double()
    return _best(worth, size) if recipe.shared else _best_apart(worth, size)


def _best(worth: Tensor, width: int) -> Tensor:
    """Each slot's best; [slots, width]."""
    return worth.argsort(dim=1, descending=True, stable=True)[:, :width].sort(dim=1).values


def _best_apart(worth: Tensor, width: int) -> Tensor:
    """The best pairs of slot and neuron first, no neuron in two slots; [slots, width]."""
    slots, neurons = worth.shape
    taken: list[list[int]] = [[] for _ in range(slots)]
    free = [True] * neurons
    for pair in worth.flatten().argsort(descending=True, stable=True).tolist():
        slot, neuron = divmod(pair, neurons)
        if free[neuron] and len(taken[slot]) < width:
            free[neuron] = False
            taken[slot].append(neuron)
    return torch.tensor(taken, device=worth.device).sort(dim=1).values
