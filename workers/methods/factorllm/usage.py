"""How the routers of divided networks are read when a model is watched."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from moevolve.kernels.expert_ffn import choose_experts
from moevolve.workers.contract.methods import UsageReaders
from moevolve.workers.contract.usage import RoutedLayer
from moevolve.workers.methods.factorllm.apply import FactorizedNetwork
from moevolve.workers.methods.factorllm.edit import FactorLlmEdit


def _choices(network: FactorizedNetwork, args: tuple[Any, ...], output: Any) -> tuple[Tensor, Tensor]:
    """See `RoutingReader`."""
    flat = args[0].reshape(-1, args[0].shape[-1])
    chosen = choose_experts(flat, network.router_weight, network.router_bias, network.active)
    return chosen, chosen.double() * network.output_scale


def _with_neurons(layer: RoutedLayer, position: int, edit: FactorLlmEdit) -> RoutedLayer:
    return replace(layer, neurons=(edit.width // edit.experts, edit.width, edit.width))


USAGE = UsageReaders({FactorizedNetwork: _choices}, _with_neurons)
