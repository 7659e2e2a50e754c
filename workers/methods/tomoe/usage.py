"""How the routers of masked networks are read when a model is watched."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from moevolve.kernels.neuron_mask import choose_expert
from moevolve.workers.contract.methods import UsageReaders
from moevolve.workers.contract.usage import RoutedLayer
from moevolve.workers.methods.tomoe.apply import MaskedNetwork
from moevolve.workers.methods.tomoe.edit import ToMoeEdit


def _choices(network: MaskedNetwork, args: tuple[Any, ...], output: Any) -> tuple[Tensor, Tensor]:
    """See `RoutingReader`."""
    logits, chosen = choose_expert(args[0].reshape(-1, args[0].shape[-1]), network.router)
    return nn.functional.one_hot(chosen, logits.shape[-1]), torch.softmax(logits, dim=-1)


def _with_neurons(layer: RoutedLayer, position: int, edit: ToMoeEdit) -> RoutedLayer:
    union = int(edit.kept[layer.layer].any(axis=0).sum())
    return replace(layer, neurons=(int(edit.widths[layer.layer]), union, edit.width))


USAGE = UsageReaders({MaskedNetwork: _choices}, _with_neurons)
