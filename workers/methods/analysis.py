"""Watching experts at work: a resident model, edited or not, runs prompts and every router's choices are counted."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from moevolve.evaluators.errors import UserError
from moevolve.kernels.expert_ffn import choose_experts
from moevolve.kernels.neuron_mask import choose_expert
from moevolve.workers.engine.tokenizing import Tokens
from moevolve.workers.methods.base import Edit
from moevolve.workers.methods.eep.edit import EepEdit
from moevolve.workers.methods.eep.router import EditableRouter
from moevolve.workers.methods.factorllm.apply import FactorizedNetwork
from moevolve.workers.methods.factorllm.edit import FactorLlmEdit
from moevolve.workers.methods.nanomoe.apply import BlockMixedLinear
from moevolve.workers.methods.nanomoe.edit import NanoMoeEdit
from moevolve.workers.methods.tomoe.apply import MaskedNetwork
from moevolve.workers.methods.tomoe.edit import ToMoeEdit
from moevolve.workers.methods.usage import MixedLayer, RoutedLayer, Usage
from moevolve.workers.model.resident import ResidentModel

_LAYER = re.compile(r"layers\.(\d+)\.")


class _Counter:
    """Sums over tokens of one layer, on its device."""

    def __init__(self) -> None:
        self._weights: Tensor | None = None
        self._together = torch.empty(0)

    def add(self, chosen: Tensor, weights: Tensor) -> None:
        """Take in tokens: which experts they chose, 0 or 1 [tokens, E], and by what outputs are scaled, [tokens, E]."""
        if self._weights is None:
            experts = chosen.shape[1]
            self._weights = torch.zeros(experts, dtype=torch.float64, device=chosen.device)
            self._together = torch.zeros(experts, experts, dtype=torch.float64, device=chosen.device)
        ones = chosen.double()
        self._together += ones.t() @ ones
        self._weights += weights.double().sum(dim=0)

    def layer(self, index: int) -> RoutedLayer:
        assert self._weights is not None, "a layer of experts was not run"
        together: NDArray[np.int64] = self._together.round().long().cpu().numpy()
        return RoutedLayer(index, np.diagonal(together).copy(), self._weights.cpu().numpy(), together)


@torch.inference_mode()
def analyse_usage(resident: ResidentModel, edit: Edit, sequences: Sequence[Tokens]) -> Usage:
    """Run token sequences, each by itself, through a model with `edit` and count what its routers choose.

    Args:
        resident: with any edit or none; it is unedited afterwards.
        edit: `IdentityEdit` for the model as loaded.
        sequences: token ids.

    Raises:
        UserError: there are no tokens, or the edit doesn't fit this model.
        CandidateError: the edit's values are at fault.
    """
    if not sequences:
        raise UserError("there are no prompts to analyse")
    with resident.edited(edit), ExitStack() as stack:
        decoder = resident.model.get_decoder()
        watched = list(_watch(decoder, stack))
        for tokens in sequences:
            resident.run(tokens)
        routed = tuple(_described(find(), position, edit) for position, find in enumerate(watched))
        return Usage(sum(map(len, sequences)), routed, _mixed_layers(decoder, edit))


def _watch(decoder: nn.Module, stack: ExitStack) -> list[Callable[[], RoutedLayer]]:
    """Count at every layer of experts until `stack` closes; what each saw is asked for at the end."""
    found: list[Callable[[], RoutedLayer]] = []
    for name, module in decoder.named_modules():
        matched = _LAYER.search(f"{name}.")
        if matched is None:
            continue
        if type(module) in _HOOKS:
            counter = _Counter()
            stack.callback(module.register_forward_hook(_HOOKS[type(module)](counter)).remove)
            found.append(partial(counter.layer, int(matched[1])))
    return found


Hook = Callable[[nn.Module, tuple[Any, ...], Any], None]


def _routes(counter: _Counter) -> Hook:
    def hook(router: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        assert isinstance(router, EditableRouter)
        plan = router.plan
        if plan is not None and plan.slots is not None:
            # Slots are places in the tensors, and two new experts may share one: ask for the experts themselves.
            router.plan = replace(plan, slots=None)
            output = router.forward(*args)
            router.plan = plan
        logits, weights, chosen = output
        experts = logits.shape[-1] if plan is None else _experts_of(router)
        # Dynamic skipping leaves a skipped expert in its place, with weight 0.
        used = torch.ones_like(chosen, dtype=torch.bool) if plan is None or plan.skip_below is None else weights != 0
        picked = torch.zeros(len(chosen), experts, dtype=torch.bool, device=chosen.device).scatter_(1, chosen, used)
        scaled = torch.zeros(picked.shape, dtype=torch.float64, device=chosen.device)
        counter.add(picked, scaled.scatter_(1, chosen, weights.double()))

    return hook


def _experts_of(router: EditableRouter) -> int:
    plan = router.plan
    assert plan is not None
    tensor = next(each for each in (plan.selected, plan.mapping, plan.folded) if each is not None)
    return int(tensor.shape[0])


def _divisions(counter: _Counter) -> Hook:
    def hook(network: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        assert isinstance(network, FactorizedNetwork)
        flat = args[0].reshape(-1, args[0].shape[-1])
        chosen = choose_experts(flat, network.router_weight, network.router_bias, network.active)
        counter.add(chosen, chosen.double() * network.output_scale)

    return hook


def _masks(counter: _Counter) -> Hook:
    def hook(network: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        assert isinstance(network, MaskedNetwork)
        logits, chosen = choose_expert(args[0].reshape(-1, args[0].shape[-1]), network.router)
        counter.add(nn.functional.one_hot(chosen, logits.shape[-1]), torch.softmax(logits, dim=-1))

    return hook


_HOOKS: dict[type, Callable[[_Counter], Hook]] = {
    EditableRouter: _routes,
    FactorizedNetwork: _divisions,
    MaskedNetwork: _masks,
}


def _described(layer: RoutedLayer, position: int, edit: Edit) -> RoutedLayer:
    """A layer with what its edit says of its experts."""
    if isinstance(edit, EepEdit):
        return replace(layer, origins=tuple(np.abs(edit.expert_merging[position]).argmax(axis=1).tolist()))
    if isinstance(edit, FactorLlmEdit):
        return replace(layer, neurons=(edit.width // edit.experts, edit.width, edit.width))
    if isinstance(edit, ToMoeEdit):
        union = int(edit.kept[layer.layer].any(axis=0).sum())
        return replace(layer, neurons=(int(edit.widths[layer.layer]), union, edit.width))
    return layer


def _mixed_layers(decoder: nn.Module, edit: Edit) -> tuple[MixedLayer, ...]:
    if not isinstance(edit, NanoMoeEdit):
        return ()
    modules = dict(decoder.named_modules())
    layers = []
    for name in edit.layers:
        module = modules[name]
        assert isinstance(module, BlockMixedLinear)
        layers.append(MixedLayer(name, edit.form.variant, _blocks(edit.form.variant, module.mixing)))
    return tuple(layers)


def _blocks(variant: str, mixing: Tensor | None) -> NDArray[np.float64]:
    """One number per block of M; see `MixedLayer`."""
    if mixing is None:
        return np.ones((1, 1))
    parameters: NDArray[np.float64] = mixing.double().cpu().numpy()
    if variant == "I":
        return parameters
    if variant == "II":
        return np.sqrt((parameters**2).mean(axis=-1))
    diagonal, alpha, beta = parameters
    # |diag(c) + alpha beta^T|_F^2 without building it.
    square = (diagonal**2).sum(-1) + 2 * (diagonal * alpha * beta).sum(-1)
    square += (alpha**2).sum(-1) * (beta**2).sum(-1)
    return np.sqrt(np.maximum(square, 0) / diagonal.shape[-1])
