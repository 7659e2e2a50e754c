"""Matching the hidden neurons of gated experts, so that equal places hold alike neurons.

Source: Git Re-Basin (arXiv 2209.04836), Sec. 3.1 (activation matching) and 3.2 (weight matching), each a linear
assignment, and App. A.10 (several networks: every one in turn is matched to the others' mean until nothing moves). A
gated expert has one more symmetry than the paper's networks: a neuron's up row, activation and down column may change
sign together. So two neurons are as alike as their gate rows are, plus as the rest is up to a sign.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn

from moevolve.evaluators.errors import UserError
from moevolve.workers.families.base import EXPERT_TENSORS
from moevolve.workers.methods.base import Calibration, Tokens
from moevolve.workers.methods.contract import Resident
from moevolve.workers.methods.eep.alignment import encode, sources
from moevolve.workers.methods.eep.edit import AlignmentRecipe


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
        """The same neurons in the places that codes give them; see `workers.methods.eep.alignment.Alignment`."""
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


ALIGNMENT = "alignment"
"""Name of the array."""


def calibrate_alignment(resident: Resident, sequences: Sequence[Tokens], recipe: AlignmentRecipe) -> Calibration:
    """Align the experts of every MoE layer; the reference is the one that most tokens are sent to.

    Time goes with the cube of an expert's width, at worst, for each of experts x (1 + rounds) assignments per layer.
    Memory beside the model: about twice an expert in float32, and three matrices [width, width].

    Returns:
        Array `alignment`: the codes of an `Alignment`, int16 or int32 [layers, n, width].

    Raises:
        UserError: no experts of the form `down(act(gate x) * up x)`, or no tokens.
    """
    if not resident.layers:
        raise UserError("genome.align: this model has no experts to align")
    if not sequences:
        raise UserError("genome.align: there are no prompts to measure activations on")
    if not all(_is_plain(layer.experts) for layer in resident.layers):
        raise UserError(
            f"genome.align: experts of {resident.model.config.model_type} are not plain gated networks; use none"
        )
    inputs, uses = _watch(resident, sequences, recipe.sample)
    codes = []
    for ordinal, counts in enumerate(uses):
        order = np.argsort(-counts, kind="stable").tolist()
        codes.append(match_all(order, partial(_neurons, resident, ordinal, inputs[ordinal]), recipe.rounds))
    return Calibration({ALIGNMENT: np.stack(codes)})


def _is_plain(experts: nn.Module) -> bool:
    """Whether experts are `down(act(gate x) * up x)`, with gate and up one after the other in rows, and no biases."""
    expected = {"has_gate": True, "has_bias": False, "is_transposed": False, "is_concatenated": True}
    names = {name for name, _ in experts.named_parameters()}
    activation: Any = getattr(experts, "act_fn", None)
    combine: Any = getattr(experts, "_apply_gate", None)
    if activation is None or names != set(EXPERT_TENSORS):
        return False
    if any(getattr(experts, name, value) != value for name, value in expected.items()):
        return False
    # Some families clamp or scale within; then a sign can't change sides.
    probe = torch.linspace(-30.0, 30.0, 64).view(2, 32)
    gate, up = probe.chunk(2, dim=-1)
    return combine is None or torch.equal(combine(probe), activation(gate) * up)


def _neurons(resident: Resident, ordinal: int, inputs: Tensor, expert: int) -> Neurons:
    layer = resident.layers[ordinal]
    originals = resident.original_experts(ordinal)
    gate_up, down = (originals[name][expert].to(inputs.device) for name in EXPERT_TENSORS)
    activation: Callable[[Tensor], Tensor] = layer.experts.act_fn  # type: ignore[assignment]
    return Neurons.of(gate_up, down, inputs, activation)


@torch.inference_mode()
def _watch(resident: Resident, sequences: Sequence[Tokens], sample: int) -> tuple[list[Tensor], list[Any]]:
    """Per MoE layer: evenly spaced tokens' inputs [at most `sample`, hidden], and how often each expert was chosen."""
    stride = -(-sum(map(len, sequences)) // sample)
    layers = resident.layers
    inputs: list[list[Tensor]] = [[] for _ in layers]
    uses = [np.zeros(layer.count, dtype=np.int64) for layer in layers]
    begun = 0

    def keep(ordinal: int, module: nn.Module, args: tuple[Any, ...]) -> None:
        inputs[ordinal].append(args[0].flatten(0, -2)[-begun % stride :: stride].clone())

    def count(ordinal: int, module: nn.Module, args: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
        uses[ordinal] += np.bincount(output[2].flatten().cpu().numpy(), minlength=len(uses[ordinal]))

    with ExitStack() as stack:
        for ordinal, layer in enumerate(layers):
            stack.callback(layer.block.register_forward_pre_hook(partial(keep, ordinal)).remove)
            stack.callback(layer.gate.register_forward_hook(partial(count, ordinal)).remove)
        for tokens in sequences:
            resident.run(tokens)
            begun += len(tokens)
    return [torch.cat(each) for each in inputs], uses
