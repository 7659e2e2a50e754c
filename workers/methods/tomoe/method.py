"""ToMoE as a method, and how its routers are read when a model is observed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from moevolve.kernels.neuron_mask import choose_expert
from moevolve.workers.contract.methods import Method, UsageReaders
from moevolve.workers.contract.usage import RoutedLayer
from moevolve.workers.methods.tomoe.apply import MaskedNetwork, ToMoeApplicator
from moevolve.workers.methods.tomoe.calibrate import calibrate_tomoe
from moevolve.workers.methods.tomoe.edit import ToMoeEdit, ToMoeRecipe
from moevolve.workers.methods.tomoe.export import ToMoeExporter, masked_network_use, masked_values_use


def _read_routing(network: MaskedNetwork, args: tuple[Any, ...], output: Any) -> tuple[Tensor, Tensor]:
    """See `RoutingReader`."""
    logits, chosen = choose_expert(args[0].reshape(-1, args[0].shape[-1]), network.router)
    return nn.functional.one_hot(chosen, logits.shape[-1]), torch.softmax(logits, dim=-1)


def _with_neurons(layer: RoutedLayer, position: int, edit: ToMoeEdit) -> RoutedLayer:
    union = int(edit.kept[layer.layer].any(axis=0).sum())
    return replace(layer, neurons=(int(edit.widths[layer.layer]), union, edit.width))


TOMOE = Method(
    edit=ToMoeEdit,
    applicator=ToMoeApplicator,
    exporter=ToMoeExporter(),
    calibrators={ToMoeRecipe: calibrate_tomoe},
    usage=UsageReaders({MaskedNetwork: _read_routing}, _with_neurons),
    module_uses={"MaskedNetwork": masked_network_use, "MaskedValues": masked_values_use},
)
