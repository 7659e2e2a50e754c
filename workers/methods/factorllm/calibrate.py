"""The start of FactorLLM genomes: a partition of every network's neurons into experts, and closed-form routers.

Source: FactorLLM (arXiv 2408.11855), Sec. 3.2 (equal partition) and Sec. 3.3 (Prior-Approximate Router). The paper
calls its partition simpler than k-means and leaves the permutation open; the authors' code takes equal slices in order,
and so does the start. The partition `kmeans` is MoEfication's (arXiv 2110.01786), with FactorLLM's routers. A token's
labels are the K experts whose outputs are nearest the whole network's output in mean squared error. The paper trains
the router on these labels by cross entropy; here the router is their ridge regression on the network's inputs.

For one router per linear layer (R > 1) the paper defines no labels. Here the same rule applies layer by layer: a
router's labels are the K slices of its layer whose outputs are nearest the whole layer's output. Slices of gate and up
projections are separate neurons, so the nearest slices are the largest; those of the gate (of the up projection in a
plain network) are taken after the activation. Slices of the down projection give the experts' outputs. Labels by the
error of the network's output with one layer routed would be the same for all routers: a slice that is zero in any layer
contributes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from moevolve.workers.contract.edits import Calibration, Tokens
from moevolve.workers.contract.methods import Resident
from moevolve.workers.families.layers import DenseLayer
from moevolve.workers.methods.factorllm.balanced_clusters import balanced_kmeans
from moevolve.workers.methods.factorllm.edit import FactorLlmMeasurement
from moevolve.workers.methods.shared.input_statistics import InputStatistics, memory_batches, principal_directions
from moevolve.workers.methods.shared.passes import watch_networks


def calibrate_factorllm(
    resident: Resident, sequences: Sequence[Tokens], measurement: FactorLlmMeasurement
) -> Calibration:
    """Partition every network and fit its routers; the first three names begin with the partition's.

    Returns:
        - `start_experts` uint8 [layers, width], the expert of every neuron.
        - `start_weight` float32 [layers, R, N, hidden] and `start_bias` float32 [layers, R, N], routers in the order
          gate, up, down, scaled so that a router's logits have standard deviation 1 over tokens.
        - `directions` float32 [layers, components, hidden]; see `principal_directions`.
        - `offsets` float32 [layers, components], the mean input's coordinates along these directions; zero if routers
          have no bias.
    """
    layers = resident.dense_layers
    partitions = []
    for i, layer in enumerate(layers):
        experts = np.repeat(np.arange(measurement.experts), layer.width // measurement.experts)
        if measurement.partition == "kmeans":
            experts = balanced_kmeans(unit_rows(activation_weights(layer)), measurement.experts, layer_rng(i))
        partitions.append(experts)  # they are numbered in order of their first neurons
    starts: list[dict[str, NDArray[np.float32]]] = []
    for batch in memory_batches(layers, lambda layer: 8 * layer.hidden**2):
        chosen = partitions[len(starts) : len(starts) + len(batch)]
        starts += _measure(resident, sequences, measurement, batch, chosen)
    measured = {name: np.stack([start[name] for start in starts]) for name in starts[0]}
    return Calibration({f"{measurement.partition}_experts": np.stack(partitions).astype(np.uint8), **measured})


def _measure(
    resident: Resident,
    sequences: Sequence[Tokens],
    measurement: FactorLlmMeasurement,
    layers: Sequence[DenseLayer],
    partitions: Sequence[NDArray[np.int64]],
) -> list[dict[str, NDArray[np.float32]]]:
    """Return the measured arrays of every network, by the names of the calibration."""
    targets = measurement.routers * measurement.experts
    statistics = [InputStatistics(layer.hidden, targets, layer.up.weight.device) for layer in layers]
    orders = [torch.from_numpy(np.argsort(experts, kind="stable")) for experts in partitions]

    def watch(i: int, inputs: Tensor, activations: Tensor) -> None:
        order = orders[i].to(activations.device)
        labels = [nearest_experts(activations[:, order], layers[i].down.weight[:, order], measurement)]
        if measurement.routers > 1:
            labels = [largest_slices(each[:, order], measurement) for each in _gate_and_up(layers[i], inputs)] + labels
        statistics[i].add_pairs(inputs, torch.cat(labels, dim=1))

    watch_networks(resident, sequences, [(layer, partial(watch, i)) for i, layer in enumerate(layers)])
    return [_solve(each, measurement) for each in statistics]


def nearest_experts(activations: Tensor, down: Tensor, measurement: FactorLlmMeasurement) -> Tensor:
    """Labels, float32 [tokens, N]: 1 for the K experts whose outputs are nearest the whole network's output, else 0.

    An output bias is part of every expert's output and of the whole output (Eq. 7), so it cancels.

    Args:
        activations: Activations of neurons ordered by expert, [tokens, width].
        down: Output weights of neurons ordered by expert, [hidden, width].
        measurement: Settings; N and K count.
    """
    tokens = len(activations)
    parts = activations.view(tokens, measurement.experts, -1).float()
    matrices = down.float().view(len(down), measurement.experts, -1)
    outputs = torch.einsum("tnw,dnw->ntd", parts, matrices)
    distances = (outputs - outputs.sum(dim=0)).square().sum(dim=-1).t()
    nearest = distances.topk(measurement.active, dim=1, largest=False).indices
    return torch.zeros_like(distances).scatter_(1, nearest, 1.0)


def largest_slices(values: Tensor, measurement: FactorLlmMeasurement) -> Tensor:
    """Labels, float32 [tokens, N]: 1 for the K slices of a gate or up projection nearest the whole output, else 0.

    A slice's output has zeros for all other neurons, so its squared distance is the sum of the others' squares, and the
    nearest slices are those with the largest sums of squares. `values` are the projection's outputs for neurons ordered
    by expert, [tokens, width].
    """
    sizes = values.view(len(values), measurement.experts, -1).float().square().sum(dim=-1)
    return torch.zeros_like(sizes).scatter_(1, sizes.topk(measurement.active, dim=1).indices, 1.0)


def _gate_and_up(layer: DenseLayer, inputs: Tensor) -> list[Tensor]:
    """Outputs of a network's gate projection, if it has one, and its up projection, the first after the activation."""
    # The modules themselves have hooks at this time, so they aren't called.
    linears = [layer.up] if layer.gate is None else [layer.gate, layer.up]
    first, *rest = (nn.functional.linear(inputs, linear.weight, linear.bias) for linear in linears)
    return [layer.activation(first), *rest]


def _solve(statistics: InputStatistics, measurement: FactorLlmMeasurement) -> dict[str, NDArray[np.float32]]:
    square = statistics.covariance if measurement.router_bias else statistics.moment
    weight, bias = statistics.ridge(measurement.ridge, measurement.router_bias)
    weight, bias = (
        weight.reshape(measurement.routers, measurement.experts, -1),
        bias.reshape(measurement.routers, measurement.experts),
    )
    scale = logit_scale(weight, square)
    directions = principal_directions(square, measurement.components)
    found = {
        "directions": directions,
        "offsets": directions @ statistics.mean if measurement.router_bias else directions.new_zeros(len(directions)),
        f"{measurement.partition}_weight": weight * scale[:, None, None],
        f"{measurement.partition}_bias": bias * scale[:, None],
    }
    return {name: each.float().cpu().numpy() for name, each in found.items()}


def logit_scale(weight: Tensor, square: Tensor) -> Tensor:
    """Scale of routers that gives their logits standard deviation 1 over tokens, [...]. It changes no top-k choice.

    Args:
        weight: Weights of the routers, float64 [..., N, hidden].
        square: Covariance or second moment of the inputs, float64 [hidden, hidden].
    """
    spread = (weight @ square * weight).sum(dim=-1).mean(dim=-1).clamp_min(0).sqrt()
    return 1 / torch.where(spread > 1e-9, spread, 1.0)


def activation_weights(layer: DenseLayer) -> NDArray[np.float32]:
    """Weights of the projection that the activation applies to, gate or plain network's up, float32 [width, hidden]."""
    weights: NDArray[np.float32] = (layer.up if layer.gate is None else layer.gate).weight.float().cpu().numpy()
    return weights


def unit_rows(rows: NDArray[np.float32]) -> NDArray[np.float32]:
    """Scale rows to norm 1; rows of zeros stay as they are."""
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    return (rows / np.where(lengths > 0, lengths, 1)).astype(np.float32, copy=False)


def layer_rng(layer: int) -> np.random.Generator:
    """Return a generator with a fixed seed per layer, since the start doesn't depend on the search's seed."""
    return np.random.Generator(np.random.Philox(key=layer))
