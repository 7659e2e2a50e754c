"""FactorLLM as a method, and how its routers are read when a model is observed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from moevolve.kernels.expert_ffn import choose_experts
from moevolve.workers.contract.methods import Method, UsageReaders
from moevolve.workers.contract.usage import RoutedLayer
from moevolve.workers.methods.factorllm.apply import FactorizedNetwork, FactorLlmApplicator
from moevolve.workers.methods.factorllm.calibrate import calibrate_factorllm
from moevolve.workers.methods.factorllm.calibrate_baselines import calibrate_cmoe, calibrate_moefication
from moevolve.workers.methods.factorllm.edit import CmoeRecipe, FactorLlmEdit, FactorLlmRecipe, MoeficationRecipe
from moevolve.workers.methods.factorllm.export import FactorLlmExporter, factorized_network_use


def _read_routing(network: FactorizedNetwork, args: tuple[Any, ...], output: Any) -> tuple[Tensor, Tensor]:
    """See `RoutingReader`."""
    flat = args[0].reshape(-1, args[0].shape[-1])
    chosen = choose_experts(flat, network.router_weight, network.router_bias, network.active)
    return chosen, chosen.double() * network.output_scale


def _with_neurons(layer: RoutedLayer, position: int, edit: FactorLlmEdit) -> RoutedLayer:
    return replace(layer, neurons=(edit.width // edit.experts, edit.width, edit.width))


FACTORLLM = Method(
    edit=FactorLlmEdit,
    applicator=FactorLlmApplicator,
    exporter=FactorLlmExporter(),
    calibrators={
        FactorLlmRecipe: calibrate_factorllm,
        MoeficationRecipe: calibrate_moefication,
        CmoeRecipe: calibrate_cmoe,
    },
    usage=UsageReaders({FactorizedNetwork: _read_routing}, _with_neurons),
    module_uses={"FactorizedNetwork": factorized_network_use},
)
