"""The alignment of a model's experts, measured on its weights and on what they do to tokens of the prompts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from moevolve.evaluators.errors import UserError
from moevolve.workers.calibration.alignment_recipe import AlignmentRecipe
from moevolve.workers.calibration.base import Calibration
from moevolve.workers.calibration.matching import Neurons, match_all
from moevolve.workers.layout import EXPERT_TENSORS
from moevolve.workers.resident import ResidentModel
from moevolve.workers.tokenizing import Tokens

ALIGNMENT = "alignment"
"""Name of the array."""


def calibrate_alignment(resident: ResidentModel, sequences: Sequence[Tokens], recipe: AlignmentRecipe) -> Calibration:
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


def _neurons(resident: ResidentModel, ordinal: int, inputs: Tensor, expert: int) -> Neurons:
    layer = resident.layers[ordinal]
    originals = resident.original_experts(ordinal)
    gate_up, down = (originals[name][expert].to(inputs.device) for name in EXPERT_TENSORS)
    activation: Callable[[Tensor], Tensor] = layer.experts.act_fn  # type: ignore[assignment]
    return Neurons.of(gate_up, down, inputs, activation)


@torch.inference_mode()
def _watch(resident: ResidentModel, sequences: Sequence[Tokens], sample: int) -> tuple[list[Tensor], list[Any]]:
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

    resident.revert()
    with ExitStack() as stack:
        for ordinal, layer in enumerate(layers):
            stack.callback(layer.block.register_forward_pre_hook(partial(keep, ordinal)).remove)
            stack.callback(layer.gate.register_forward_hook(partial(count, ordinal)).remove)
        for tokens in sequences:
            resident.run(tokens)
            begun += len(tokens)
    return [torch.cat(each) for each in inputs], uses
