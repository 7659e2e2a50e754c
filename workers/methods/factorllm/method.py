"""FactorLLM as a method: networks of a resident model are divided into experts, observed and exported.

Neurons are permuted in place, and experts are slices of the matrices. An export is a stock Mixtral if that computes the
same, else a checkpoint with its own modelling code.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moevolve.evaluators.errors import CandidateError
from moevolve.kernels.expert_ffn import choose_experts, expert_ffn
from moevolve.workers.checkpoints.mixtral_form import empty_mixtral, mixtral_obstacle
from moevolve.workers.checkpoints.native import native_config
from moevolve.workers.checkpoints.state import empty_model, layer_state, unedited_parameters
from moevolve.workers.contract.card import CheckpointForm, ExportSummary
from moevolve.workers.contract.edits import Edit
from moevolve.workers.contract.methods import Blueprint, Method, ModelParts, Resident, host_tensor
from moevolve.workers.families.layers import DenseLayer, Replacement
from moevolve.workers.methods.factorllm.calibrate import calibrate_factorllm
from moevolve.workers.methods.factorllm.calibrate_baselines import calibrate_cmoe, calibrate_moefication
from moevolve.workers.methods.factorllm.edit import (
    CmoeMeasurement,
    FactorLlmEdit,
    FactorLlmMeasurement,
    MoeficationMeasurement,
)
from moevolve.workers.methods.shared.dense import (
    check_shape,
    dense_layers_for,
    idle_in_network,
    inner_tensors,
    network_tensors,
    weights_of,
    write_native_dense,
)
from moevolve.workers.methods.shared.dense_outputs import (
    ActiveMask,
    MaskingNetwork,
    NetworkCopies,
    NetworkOutput,
    check_additive,
    network_output,
)
from moevolve.workers.methods.shared.outputs import Repairable

if TYPE_CHECKING:
    from transformers import PreTrainedModel


# Rows whose columns are permuted at once: pieces that fit into the cache take half the time of a whole matrix.
_ROWS = 256


class NeuronOrder:
    """Permutes a network's neurons in place.

    A permutation moves values without changing them, so the original order restores the weights bit for bit.
    """

    def __init__(self, layer: DenseLayer) -> None:
        self._rows = [*inner_tensors(layer).values()]
        self._columns = layer.down.weight.data
        self._now = np.arange(layer.width)

    def permute(self, order: NDArray[np.integer]) -> None:
        """Put original neuron `order[i]` at position i. At most one matrix is copied at a time."""
        if np.array_equal(order, self._now):
            return
        place = np.empty_like(self._now)
        place[self._now] = np.arange(len(place))
        moves = torch.from_numpy(place[order]).to(self._columns.device)
        for tensor in self._rows:
            tensor.copy_(tensor.index_select(0, moves))
        for rows in self._columns.split(_ROWS):
            rows.copy_(rows.index_select(1, moves))
        self._now = np.array(order, dtype=self._now.dtype)

    def restore(self) -> None:
        self.permute(np.arange(len(self._now)))


class FactorizedNetwork(MaskingNetwork):
    """Replaces a feed-forward network, and runs the experts that its routers choose."""

    router_weight: Tensor
    router_bias: Tensor

    def __init__(self, layer: DenseLayer) -> None:
        super().__init__()
        # In a tuple, so that the network's parameters aren't registered as this module's too.
        self._source = (layer,)
        self.active = 0
        for name in ("router_weight", "router_bias"):
            self.register_buffer(name, torch.empty(0), persistent=False)

    def set(self, weight: Tensor, bias: Tensor, active: int) -> None:
        """Set routers with weights float32 [routers, N, hidden] and biases float32 [routers, N]."""
        self.router_weight, self.router_bias, self.active = weight, bias, active

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Map hidden states [..., hidden] to outputs of the same shape."""
        flat = hidden_states.reshape(-1, hidden_states.shape[-1])
        chosen = self._choose(flat)
        return expert_ffn(flat, chosen, weights_of(self._source[0])).view(hidden_states.shape)

    def active_mask(self, hidden: Tensor) -> ActiveMask:
        experts = self.router_weight.shape[1]
        unit = self._source[0].width // experts
        kept = torch.eye(experts, dtype=torch.bool, device=hidden.device).repeat_interleave(unit, dim=1)
        return ActiveMask(self._choose(hidden), kept, unit)

    def _choose(self, hidden: Tensor) -> Tensor:
        return choose_experts(hidden, self.router_weight, self.router_bias, self.active)


class FactorLlmApplicator(Repairable):
    """Networks divided into experts (FactorLLM, arXiv 2408.11855, Eq. 5 to 7) on a resident model.

    The experts of a layer are slices of its own matrices, whose neurons are permuted in place. No weights are copied,
    and a layer with the same partition as in the previous candidate isn't touched.
    """

    def __init__(self, parts: ModelParts) -> None:
        self._layers = layers = dense_layers_for("FactorLLM", parts)
        self._replacements = tuple(Replacement(layer) for layer in layers)
        self.networks = tuple(FactorizedNetwork(layer).eval() for layer in layers)
        self.orders = tuple(NeuronOrder(layer) for layer in layers)
        self._weights = tuple(map(NetworkCopies.of, layers))

    def apply(self, edit: Edit) -> None:
        assert isinstance(edit, FactorLlmEdit)
        check_shape(edit.layers, edit.width, edit.hidden, self._layers)
        if not edit.finite:
            raise CandidateError("a router's entry is not finite")
        self._restore_weights()
        weights, biases = host_tensor(edit.router_weight), host_tensor(edit.router_bias)
        for i, (layer, network, order) in enumerate(zip(self._layers, self.networks, self.orders, strict=True)):
            order.permute(edit.order[i])
            device = layer.up.weight.device
            network.set(weights[i].to(device), biases[i].to(device), edit.active)
            self._replacements[i].show(network)

    def revert(self) -> None:
        self._restore_weights()
        for replacement, order in zip(self._replacements, self.orders, strict=True):
            replacement.restore()
            order.restore()

    def outputs(self) -> tuple[NetworkOutput, ...]:
        check_additive(self._layers[0])
        return tuple(map(network_output, self._layers, self._weights, self._replacements, self.networks))

    def _restore_weights(self) -> None:
        for weights in self._weights:
            weights.restore()


def _read_routing(network: FactorizedNetwork, args: tuple[Tensor, ...], output: object) -> tuple[Tensor, Tensor]:
    flat = args[0].reshape(-1, args[0].shape[-1])
    chosen = choose_experts(flat, network.router_weight, network.router_bias, network.active)
    return chosen, chosen.double()


class FactorLlmExporter:
    """Exports models of divided networks."""

    def obstacle(self, resident: Resident, edit: Edit) -> str | None:
        assert isinstance(edit, FactorLlmEdit)
        if edit.active == 1 and edit.routers == 1 and not edit.router_bias.any():
            return mixtral_obstacle(resident)
        return "outputs of several experts are summed without weights, or routers have biases: no Mixtral's"

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
            rows=(("division", name),),
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
    """Return the tensors of a Mixtral's experts and router."""
    assert layer.gate is not None
    yield "mlp.gate.weight", host_tensor(edit.router_weight[i, 0])
    halves = [each.weight.data.view(edit.experts, -1, layer.hidden) for each in (layer.gate, layer.up)]
    yield "mlp.experts.gate_up_proj", torch.cat(halves, dim=1)
    yield "mlp.experts.down_proj", layer.down.weight.data.view(layer.hidden, edit.experts, -1).transpose(0, 1)


def _native_network(layer: DenseLayer, edit: FactorLlmEdit, i: int) -> Iterator[tuple[str, Tensor]]:
    """Return the tensors of a `FactorizedNetwork` in `native.py.jinja`."""
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
    )
    config = native_config(source, model_class)
    config.factor_experts, config.factor_active, config.factor_routers = edit.experts, edit.active, edit.routers
    return empty_model(model_class, config, source.dtype)


FACTORLLM = Method(
    edit=FactorLlmEdit,
    applicator=FactorLlmApplicator,
    exporter=FactorLlmExporter(),
    calibrators={
        FactorLlmMeasurement: calibrate_factorllm,
        MoeficationMeasurement: calibrate_moefication,
        CmoeMeasurement: calibrate_cmoe,
    },
    routing={FactorizedNetwork: _read_routing},
    idle={
        "FactorizedNetwork": lambda module, config: idle_in_network(
            module, config, active=config.factor_active, of=config.factor_experts
        )
    },
)
