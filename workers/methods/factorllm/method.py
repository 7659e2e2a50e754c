"""FactorLLM as a method: how its routers are read when a model is observed, and how its edits are exported.

An export is a stock Mixtral if that computes the same, else a checkpoint with its own modelling code.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from moevolve.kernels.expert_ffn import choose_experts
from moevolve.workers.checkpoints.mixtral_form import empty_mixtral, mixtral_obstacle
from moevolve.workers.checkpoints.native import native_config
from moevolve.workers.checkpoints.state import empty_model, layer_state
from moevolve.workers.contract.card import CheckpointForm, ExportSummary
from moevolve.workers.contract.edits import Edit
from moevolve.workers.contract.methods import Blueprint, Method, Resident, host_tensor
from moevolve.workers.families.layers import DenseLayer
from moevolve.workers.methods.factorllm.apply import FactorizedNetwork, FactorLlmApplicator
from moevolve.workers.methods.factorllm.calibrate import calibrate_factorllm
from moevolve.workers.methods.factorllm.calibrate_baselines import calibrate_cmoe, calibrate_moefication
from moevolve.workers.methods.factorllm.edit import CmoeRecipe, FactorLlmEdit, FactorLlmRecipe, MoeficationRecipe
from moevolve.workers.methods.shared.dense import network_tensors, network_use, unedited_parameters, write_native_dense

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def _read_routing(network: FactorizedNetwork, args: tuple[Any, ...], output: Any) -> tuple[Tensor, Tensor]:
    flat = args[0].reshape(-1, args[0].shape[-1])
    chosen = choose_experts(flat, network.router_weight, network.router_bias, network.active)
    return chosen, chosen.double() * network.output_scale


class FactorLlmExporter:
    """Exports models of divided networks."""

    def obstacle(self, resident: Resident, edit: Edit, requested: CheckpointForm | None = None) -> str | None:
        assert isinstance(edit, FactorLlmEdit)
        if edit.active == 1 and edit.routers == 1 and edit.output_scale == 1 and not edit.router_bias.any():
            return mixtral_obstacle(resident)
        return "outputs of several experts are summed without weights, are scaled, or routers have biases: no Mixtral's"

    def summary(self, resident: Resident, edit: Edit, form: CheckpointForm) -> ExportSummary:
        assert isinstance(edit, FactorLlmEdit)
        layers = resident.dense_layers
        name = f"{edit.routers}R{edit.experts}E{edit.active}K"
        return ExportSummary(
            experts=edit.experts,
            active=edit.active,
            parameters_before=unedited_parameters(resident),
            lead=(
                f"{layers[0].family.title} with every feed-forward network divided into {edit.experts} equal experts, "
                f"{edit.active} active per token"
            ),
            method="FactorLLM's division (arXiv 2408.11855)",
            tag="sparse-activation",
            form_note=(
                "The modelling code beside this card routes every token to its experts; it needs `transformers` only."
                if form == "native"
                else "A stock Mixtral checkpoint: no custom code."
            ),
            rows=(("division", name), ("factor on outputs", f"{edit.output_scale:g}")),
        )

    def build(self, resident: Resident, edit: Edit, form: CheckpointForm, directory: Path) -> Blueprint:
        assert isinstance(edit, FactorLlmEdit)
        if form == "stock":
            model = empty_mixtral(resident, edit.experts, edit.width // edit.experts)
        else:
            model = _native(resident, edit, directory)
        networks = _stock_network if form == "stock" else _native_network

        def layer(index: int) -> Iterator[tuple[str, Tensor]]:
            # The network is replaced: none of its tensors is in the layer's state.
            yield from layer_state(resident, index).items()
            yield from networks(resident.dense_layers[index], edit, index)

        return Blueprint(model, layer)


def _stock_network(layer: DenseLayer, edit: FactorLlmEdit, i: int) -> Iterator[tuple[str, Tensor]]:
    """Tensors of a Mixtral's experts and router."""
    assert layer.gate is not None
    yield "mlp.gate.weight", host_tensor(edit.router_weight[i, 0])
    halves = [each.weight.data.view(edit.experts, -1, layer.hidden) for each in (layer.gate, layer.up)]
    yield "mlp.experts.gate_up_proj", torch.cat(halves, dim=1)
    yield "mlp.experts.down_proj", layer.down.weight.data.view(layer.hidden, edit.experts, -1).transpose(0, 1)


def _native_network(layer: DenseLayer, edit: FactorLlmEdit, i: int) -> Iterator[tuple[str, Tensor]]:
    """Tensors of a `FactorizedNetwork` in `native.py.jinja`."""
    place = layer.family.up if layer.family.inline else "mlp"
    for name, tensor in network_tensors(layer).items():
        yield f"{place}.{name}", tensor
    for name, array in (("router_weight", edit.router_weight), ("router_bias", edit.router_bias)):
        yield f"{place}.{name}", host_tensor(array[i])


def _native(resident: Resident, edit: FactorLlmEdit, directory: Path) -> PreTrainedModel:
    """Write the native model's code, and build the model on the meta device."""
    source = resident.model
    model_class = write_native_dense(
        resident,
        directory,
        "methods/factorllm/native.py.jinja",
        width=edit.width,
        experts=edit.experts,
        active=edit.active,
        routers=edit.routers,
        scale=repr(float(edit.output_scale)),
    )
    config = native_config(source, model_class)
    config.factor_experts, config.factor_active = edit.experts, edit.active
    config.factor_routers, config.factor_scale = edit.routers, edit.output_scale
    return empty_model(model_class, config, source.dtype)


FACTORLLM = Method(
    edit=FactorLlmEdit,
    applicator=FactorLlmApplicator,
    exporter=FactorLlmExporter(),
    calibrators={
        FactorLlmRecipe: calibrate_factorllm,
        MoeficationRecipe: calibrate_moefication,
        CmoeRecipe: calibrate_cmoe,
    },
    routing={FactorizedNetwork: _read_routing},
    described=lambda layer, _, edit: replace(layer, neurons=(edit.width // edit.experts, edit.width, edit.width)),
    module_uses={
        "FactorizedNetwork": lambda module, config: network_use(
            module, config, active=config.factor_active, of=config.factor_experts
        )
    },
)
