"""Single neurons of a layer's fused experts, and choosing the neurons of kept experts among those of all experts.

After pruning, a kept expert serves tokens that several original experts served. Its neurons needn't all come from one
of them: they are chosen among the neurons of all experts by how much they contribute to the tokens that the edited
router sends to the kept expert.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from moevolve.workers.methods.shared.outputs import BLOCK_COLUMNS, Network


@dataclass(frozen=True, slots=True)
class ExpertNeurons:
    """Access to the neurons of fused experts, in any layout that `transformers` has for them.

    Attributes:
        module: The family's experts module. Its class says whether matrices are transposed, whether there are gates,
            concatenated with the ups or interleaved, and whether there are biases.
        tensors: Fused tensors by name, not always those that the module runs on.
    """

    module: Any = field(repr=False)
    tensors: Mapping[str, Tensor] = field(repr=False)

    @property
    def count(self) -> int:
        """Number of experts."""
        return len(self.tensors["down_proj"])

    @property
    def width(self) -> int:
        """Neurons I per expert."""
        # Reads a shape, because a layer whose experts aren't loaded has tensors without data.
        return int(self.tensors["down_proj"].shape[1 if self._transposed else 2])

    @property
    def hidden(self) -> int:
        """Width of the experts' inputs and outputs."""
        return int(self.tensors["down_proj"].shape[2 if self._transposed else 1])

    def down(self, expert: int) -> Tensor:
        """Return a view of an expert's output projection, [I, hidden]."""
        down = self.tensors["down_proj"].data[expert]
        return down if self._transposed else down.t()

    def gate_up(self, expert: int) -> Tensor:
        """Return a view of an expert's gate and up projections, [2I, hidden], or [I, hidden] without gates."""
        fused = self.tensors[self._inner].data[expert]
        return fused.t() if self._transposed else fused

    def gate_up_rows(self, neurons: Tensor) -> Tensor:
        """Return the rows of `gate_up` that belong to neurons [count]: [2 count], or [count] without gates."""
        if not self._gated:
            return neurons
        if self._interleaved:
            return torch.stack((2 * neurons, 2 * neurons + 1), dim=1).flatten()
        return torch.cat((neurons, neurons + self.width))

    @property
    def scales_inputs(self) -> bool:
        """Whether routing weights multiply an expert's inputs instead of its output."""
        return bool(getattr(self.module, "scales_inputs", False))

    @property
    def output_biases(self) -> tuple[str, ...]:
        """Names of tensors that belong to experts as a whole and not to single neurons."""
        return ("down_proj_bias",) if self._biased else ()

    def shapes(self, count: int, width: int) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the fused tensors of `count` experts with `width` neurons, by name."""
        hidden = self.hidden
        rows = 2 * width if self._gated else width
        gate_up, down = (count, rows, hidden), (count, hidden, width)
        if self._transposed:
            gate_up, down = (count, hidden, rows), (count, width, hidden)
        shapes: dict[str, tuple[int, ...]] = {self._inner: gate_up, "down_proj": down}
        if self._biased:
            shapes |= {f"{self._inner}_bias": (count, rows), "down_proj_bias": (count, hidden)}
        return shapes

    def activations(self, expert: int, neurons: Tensor, hidden: Tensor) -> Tensor:
        """Activations of an expert's neurons [count] on inputs [tokens, hidden]: [tokens, count], in their dtype."""
        rows = self.gate_up_rows(neurons)
        bias = self.tensors[f"{self._inner}_bias"].data[expert][rows].to(hidden.device) if self._biased else None
        gate_up = nn.functional.linear(hidden, self.gate_up(expert)[rows].to(hidden.device), bias)
        apply = self.module._apply_gate if self._gated else self.module.act_fn  # noqa: SLF001 - as `transformers` does
        activations: Tensor = apply(gate_up)
        return activations

    def features(self, expert: int, neurons: Tensor, hidden: Tensor, weights: Tensor) -> Tensor:
        """What an expert's neurons [count] give to its output projection, [tokens, count] in the dtype of `hidden`.

        `weights` are routing weights, float32 [tokens, 1].
        """
        if self.scales_inputs:
            return self.activations(expert, neurons, hidden * weights.to(hidden.dtype))
        return (self.activations(expert, neurons, hidden) * weights).to(hidden.dtype)

    def network(self, expert: int, tokens: Tensor, hidden: Tensor, weights: Tensor) -> Network:
        """Return an expert on tokens with inputs [tokens, hidden] and routing weights, float32 [tokens, 1]."""
        if self.scales_inputs:
            hidden, weights = hidden * weights.to(hidden.dtype), torch.ones_like(weights)
        weight = self.gate_up(expert)
        bias = self.tensors[f"{self._inner}_bias"].data[expert] if self._biased else None
        every = torch.arange(self.width, device=weight.device)
        neurons = torch.empty(len(weight), dtype=torch.int64, device=weight.device)
        neurons[self.gate_up_rows(every)] = (
            every.repeat_interleave(2) if self._interleaved else every.repeat(len(weight) // self.width)
        )
        activate = self.module._apply_gate if self._gated else self.module.act_fn  # noqa: SLF001 - as `transformers` does
        return Network(tokens, hidden, weights, weight, bias, self.down(expert), neurons, activate)

    def copy_from(self, source: ExpertNeurons, ids: Tensor) -> None:
        """Overwrite every expert's neurons with neurons of `source`. Output biases stay as they are.

        `ids` are the neurons of each expert, int64 [experts, I]; of J per expert, neuron j of the source's expert e is
        `e * J + j`.
        """
        for kept, row in enumerate(ids):
            for expert in (row // source.width).unique().tolist():
                to = (row // source.width == expert).nonzero()[:, 0]
                of = (row[to] % source.width).to(source.tensors["down_proj"].device)
                to = to.to(self.tensors["down_proj"].device)
                self.down(kept)[to] = source.down(expert)[of].to(to.device)
                to, of = self.gate_up_rows(to), source.gate_up_rows(of)
                self.gate_up(kept)[to] = source.gate_up(expert)[of].to(to.device)
                if self._biased:
                    name = f"{self._inner}_bias"
                    self.tensors[name].data[kept][to] = source.tensors[name].data[expert][of].to(to.device)

    @property
    def _gated(self) -> bool:
        return bool(getattr(self.module, "has_gate", True))

    @property
    def _interleaved(self) -> bool:
        return self._gated and not getattr(self.module, "is_concatenated", True)

    @property
    def _inner(self) -> str:
        """Name of the fused tensor that neurons take their inputs by."""
        return "gate_up_proj" if self._gated else "up_proj"

    @property
    def _transposed(self) -> bool:
        return bool(getattr(self.module, "is_transposed", False))

    @property
    def _biased(self) -> bool:
        return bool(getattr(self.module, "has_bias", False))


# Routing weights [tokens, k], and the experts that they belong to, int64 [tokens, k].
TopK = tuple[Tensor, Tensor]


def choose_neurons(
    neurons: ExpertNeurons,
    hidden: Tensor,
    original: TopK,
    edited: TopK,
    retained: int,
    width: int,
    token_weights: Tensor | None = None,
) -> Tensor:
    """Choose the neurons of every kept expert among those of all n experts, by importance, no neuron twice.

    The importance of neuron j of expert e for kept expert s is
    `|down_ej|^2 * sum over tokens of w_s (g_e h_ej)^2`. Here `w_s` is the edited routing weight of the kept expert,
    zero for tokens that aren't routed to it, `g_e` the unedited routing weight of expert e, and `h_ej` the neuron's
    activation.

    Args:
        neurons: Neurons of all n experts.
        hidden: Inputs of the layer's experts, [tokens, hidden].
        original, edited: Routing of these tokens by the unedited router, and by the edited one to kept experts.
        retained: Number of kept experts n'.
        width: Neurons per kept expert.
        token_weights: Factors of the tokens in these sums, float32 [tokens]; None for 1.

    Returns:
        The neurons of each kept expert; see `NeuronSelectingOutput.select_neurons`.
    """
    shares = hidden.new_zeros(len(hidden), retained, dtype=torch.float32)
    shares.scatter_(1, edited[1], edited[0].float().abs())
    if token_weights is not None:
        shares *= token_weights.to(shares.device)[:, None]
    importance = torch.zeros(retained, neurons.count * neurons.width, dtype=torch.float64, device=hidden.device)
    for expert in range(neurons.count):
        tokens, place = (original[1] == expert).nonzero(as_tuple=True)
        weights, sent = original[0][tokens, place].float()[:, None], shares[tokens]
        inputs = hidden[tokens]
        for part in torch.arange(neurons.width).split(BLOCK_COLUMNS):
            used = neurons.features(expert, part, inputs, weights).float().square()
            norms = neurons.down(expert)[part].to(hidden.device).float().square().sum(dim=1)
            columns = expert * neurons.width + part.to(importance.device)
            importance[:, columns] = ((sent.t() @ used) * norms).double()
    return _top_exclusive(importance, width)


def _top_exclusive(importance: Tensor, width: int) -> Tensor:
    """Assign the most important pairs [kept experts, neurons] first, no neuron twice: [kept experts, width].

    Since experts and neurons prefer each other by the same order of pairs, that is their only stable matching: free
    neurons go to the expert where they count most among those that would take them, and full experts drop their least
    (Gale and Shapley, American Mathematical Monthly 69, 1962), all at once, until no neuron moves.
    """
    experts, neurons = importance.shape
    # Places in the order of pairs count from the last, so that no two are equal.
    order = importance.flatten().argsort(descending=True, stable=True)
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order), 0, -1, device=order.device)
    places = places.view(experts, neurons)
    owner = torch.full((neurons,), -1, device=order.device)
    # What a pair must exceed for a full expert to take it.
    least = torch.zeros(experts, 1, dtype=places.dtype, device=order.device)
    free = torch.arange(neurons, device=order.device)
    while len(free):
        offered = places[:, free]
        best, expert = offered.masked_fill(offered <= least, 0).max(dim=0)
        free, expert = free[best > 0], expert[best > 0]
        owner[free] = expert
        by_place = places.gather(0, owner.clamp(min=0)[None])[0].argsort(descending=True)
        by_expert = by_place[owner[by_place].argsort(stable=True)][int((owner < 0).sum()) :]
        counts = owner[by_expert].bincount(minlength=experts)
        rank = torch.arange(len(by_expert), device=order.device) - (counts.cumsum(0) - counts)[owner[by_expert]]
        last, free = by_expert[rank == width - 1], by_expert[rank >= width]
        least[owner[last], 0] = places[owner[last], last]
        owner[free] = -1
    return owner.argsort(stable=True)[-experts * width :].view(experts, width)
