"""Matching the hidden neurons of gated experts, so that equal places hold alike neurons.

Source: Git Re-Basin (arXiv 2209.04836), Sec. 3.1 (activation matching) and 3.2 (weight matching), each a linear
assignment, and App. A.10 (several networks: every one in turn is matched to the others' mean until nothing moves). A
gated expert has one more symmetry than the paper's networks: a neuron's up row, activation and down column may change
sign together. So two neurons are as alike as their gate rows are, plus as the rest is up to a sign.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from moevolve.workers.edits.alignment import encode, sources


@dataclass(frozen=True, slots=True, eq=False)
class Neurons:
    """What neurons are compared by; sums of several experts' too.

    Attributes:
        gate: gate rows, float32 [width, hidden].
        rest: up rows, down columns and centred activations on common tokens, each float32 [width, anything].
    """

    gate: Tensor
    rest: tuple[Tensor, ...]

    @classmethod
    def of(cls, gate_up: Tensor, down: Tensor, inputs: Tensor, activation: Callable[[Tensor], Tensor]) -> Neurons:
        """The neurons of one expert. Every matrix is scaled to norm 1, so that all four weigh the same.

        Args:
            gate_up: [2 * width, hidden].
            down: [hidden, width].
            inputs: common tokens, [tokens, hidden]; there may be none.
            activation: of the gate.
        """
        gate, up = gate_up.float().chunk(2)
        active = (activation(inputs.float() @ gate.t()) * (inputs.float() @ up.t())).t()
        if active.shape[1]:
            active = active - active.mean(dim=1, keepdim=True)
        return cls(_unit(gate), (_unit(up), _unit(down.float().t()), _unit(active)))

    def arranged(self, codes: NDArray[np.signedinteger]) -> Neurons:
        """The same neurons in the places that codes give them; see `moevolve.workers.edits.alignment.Alignment`."""
        places = torch.from_numpy(sources(codes).astype(np.int64)).to(self.gate.device)
        signs = torch.from_numpy(np.where(codes < 0, -1, 1).astype(np.float32)).to(self.gate.device)[:, None]
        return Neurons(self.gate[places], tuple(each[places] * signs for each in self.rest))

    def plus(self, other: Neurons, share: float = 1.0) -> Neurons:
        """This and a multiple of another, place by place."""
        rest = tuple(mine + share * theirs for mine, theirs in zip(self.rest, other.rest, strict=True))
        return Neurons(self.gate + share * other.gate, rest)


def match(neurons: Neurons, target: Neurons) -> NDArray[np.signedinteger]:
    """The arrangement of neurons whose products with the target's sum to the most.

    Returns:
        Codes [width].
    """
    rest = sum(theirs @ mine.t() for theirs, mine in zip(target.rest, neurons.rest, strict=True))
    assert isinstance(rest, Tensor)
    alike = (target.gate @ neurons.gate.t() + rest.abs()).double().cpu().numpy()
    places, chosen = linear_sum_assignment(alike, maximize=True)
    negative = rest.cpu().numpy()[places, chosen] < 0
    return encode(chosen, negative)


def match_all(order: Sequence[int], neurons: Callable[[int], Neurons], rounds: int) -> NDArray[np.signedinteger]:
    """Align the experts of a layer with each other.

    The first of `order` is the reference, whose neurons stay where they are. The others are matched one after the other
    to the sum of those before them, then in turn to the sum of all others, which makes the sum over all pairs of
    experts of how alike they are larger each time.

    Args:
        order: all experts, the reference first.
        neurons: of an expert; asked for again whenever they are needed, so that one expert's are held at a time.
        rounds: at most so many turns; they end when nothing moves.

    Returns:
        Codes [experts, width].
    """
    reference, *others = order
    total = neurons(reference)
    width = len(total.gate)
    codes = np.stack([encode(np.arange(width), np.zeros(width, dtype=np.bool_))] * len(order))
    for expert in others:
        own = neurons(expert)
        codes[expert] = match(own, total)
        total = total.plus(own.arranged(codes[expert]))
    for _ in range(rounds):
        before = codes.copy()
        for expert in others:
            own = neurons(expert)
            rest = total.plus(own.arranged(codes[expert]), -1.0)
            codes[expert] = match(own, rest)
            total = rest.plus(own.arranged(codes[expert]))
        if np.array_equal(codes, before):
            break
    return codes


def _unit(matrix: Tensor) -> Tensor:
    return matrix / matrix.norm().clamp_min(1e-30)
