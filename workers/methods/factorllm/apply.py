"""Applying FactorLLM edits to a resident model: neurons are permuted in place, experts are slices of the matrices."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from moevolve.evaluators.errors import CandidateError
from moevolve.kernels.expert_ffn import choose_experts, expert_ffn
from moevolve.workers.contract.edits import Edit
from moevolve.workers.contract.methods import ModelParts, host_tensor
from moevolve.workers.families.layers import DenseLayer, Replacement
from moevolve.workers.methods.factorllm.edit import FactorLlmEdit
from moevolve.workers.methods.shared.dense import check_shape, dense_layers_for, weights_of
from moevolve.workers.methods.shared.dense_outputs import ActiveMask, CopyOnWriteWeights, NetworkOutput, check_additive
from moevolve.workers.methods.shared.outputs import Repairable

# Rows whose columns are permuted at once: pieces that fit into the cache take half the time of a whole matrix.
_ROWS = 256


class NeuronOrder:
    """Permutes a network's neurons in place.

    A permutation moves values without changing them, so the original order restores the weights bit for bit.
    """

    def __init__(self, layer: DenseLayer) -> None:
        linears = [layer.up] if layer.gate is None else [layer.up, layer.gate]
        self._rows = [each.weight.data for each in linears] + [
            each.bias.data for each in linears if each.bias is not None
        ]
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


class FactorizedNetwork(nn.Module):
    """Replaces a feed-forward network, and runs the experts that its routers choose."""

    router_weight: Tensor
    router_bias: Tensor

    def __init__(self, layer: DenseLayer) -> None:
        super().__init__()
        # In a tuple, so that the network's parameters aren't registered as this module's too.
        self._source = (layer,)
        self.active = 0
        self.output_scale = 1.0
        for name in ("router_weight", "router_bias"):
            self.register_buffer(name, torch.empty(0), persistent=False)

    def set(self, weight: Tensor, bias: Tensor, active: int, output_scale: float) -> None:
        """Set routers with weights float32 [routers, N, hidden] and biases float32 [routers, N]."""
        self.router_weight, self.router_bias = weight, bias
        self.active, self.output_scale = active, output_scale

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Map hidden states [..., hidden] to outputs of the same shape."""
        flat = hidden_states.reshape(-1, hidden_states.shape[-1])
        chosen = self._choose(flat)
        return expert_ffn(flat, chosen, weights_of(self._source[0]), self.output_scale).view(hidden_states.shape)

    def active_mask(self, hidden: Tensor) -> ActiveMask:
        """The active neurons for hidden states [tokens, hidden]."""
        experts = self.router_weight.shape[1]
        unit = self._source[0].width // experts
        kept = torch.eye(experts, dtype=torch.bool, device=hidden.device).repeat_interleave(unit, dim=1)
        return ActiveMask(self._choose(hidden), kept, unit, self.output_scale)

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
        self._weights = tuple(CopyOnWriteWeights(layer.down) for layer in layers)

    def apply(self, edit: Edit) -> None:
        assert isinstance(edit, FactorLlmEdit)
        check_shape(edit, self._layers)
        if not edit.finite:
            raise CandidateError("a router's entry is not finite")
        self._restore_weights()
        weights, biases = host_tensor(edit.router_weight), host_tensor(edit.router_bias)
        for i, (layer, network, order) in enumerate(zip(self._layers, self.networks, self.orders, strict=True)):
            order.permute(edit.order[i])
            device = layer.up.weight.device
            network.set(weights[i].to(device), biases[i].to(device), edit.active, edit.output_scale)
            self._replacements[i].show(network)

    def revert(self) -> None:
        self._restore_weights()
        for replacement, order in zip(self._replacements, self.orders, strict=True):
            replacement.restore()
            order.restore()

    def outputs(self) -> tuple[NetworkOutput, ...]:
        check_additive(self._layers[0])
        parts = zip(self._layers, self._weights, self.networks, self._replacements, strict=True)
        return tuple(
            NetworkOutput(layer, weights, network, network.active_mask, replacement.suspended)
            for layer, weights, network, replacement in parts
        )

    def _restore_weights(self) -> None:
        for weights in self._weights:
            weights.restore()
