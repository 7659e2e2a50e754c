"""MoEfication and CMoE as baselines: their partitions and routers in the form of FactorLLM's.

MoEfication (arXiv 2110.01786). Sec. 3.2, "parameter clustering split": neurons with similar input weights form an
expert (balanced k-means on unit vectors). Sec. 3.3, "similarity center": a token goes to the experts whose mean input
weights have the largest cosine with its input. In a gated network the input weights are the gate's, which decide
whether a neuron is active. The paper's best router is missing: a small network trained to predict the sum of an
expert's positive activations, which has no closed form.

CMoE (arXiv 2502.04416, Sec. 3). A token activates the neurons with its largest activations. Those activated most often
form shared experts, which every token runs. The others are divided into equal clusters by the tokens that activate
them, with an exact assignment. Each cluster is an expert, represented by the neuron nearest its centre. A token goes to
the experts whose representatives have the largest activations. A linear router can't compute a gated neuron's
activation, so here the router is the ridge regression of its absolute value on the network's inputs. A shared expert
has a bias larger than any logit. Experts' outputs are summed without weights, as in the paper before it trains weights
and balances loads.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moevolve.workers.contract.edits import Calibration, Tokens
from moevolve.workers.contract.methods import Resident
from moevolve.workers.families.layers import DenseLayer
from moevolve.workers.methods.factorllm.balanced_clusters import balanced_kmeans, optimal_assignment
from moevolve.workers.methods.factorllm.calibrate import activation_weights, layer_rng, logit_scale, unit_rows
from moevolve.workers.methods.factorllm.edit import CmoeMeasurement, MoeficationMeasurement
from moevolve.workers.methods.shared.input_statistics import InputMoments, InputStatistics, memory_batches
from moevolve.workers.methods.shared.passes import Watch, run_watched, watch_networks

# Bias of a shared expert; the other experts' logits have standard deviation 1.
SHARED_BIAS = 1e4
_ROUNDS = 10


def calibrate_moefication(
    resident: Resident, sequences: Sequence[Tokens], measurement: MoeficationMeasurement
) -> Calibration:
    """Partition every network as MoEfication does.

    Returns:
        - `moefication_experts` uint8 [layers, width], the expert of every neuron.
        - `moefication_weight` float32 [layers, N, hidden], routers scaled so that their logits have standard deviation
          1 over tokens.
        - `moefication_bias` float32 [layers, N], zeros: a cosine has none, and the norm of the input is the same for
          all experts.
    """
    experts: list[NDArray[np.uint8]] = []
    weights: list[NDArray[np.float32]] = []
    layers = resident.dense_layers
    for batch in memory_batches(layers, lambda layer: 8 * layer.hidden**2):
        moments = [InputMoments(layer.hidden, layer.up.weight.device) for layer in batch]
        watches = [Watch(layer.inner[-1], each.add) for layer, each in zip(batch, moments, strict=True)]
        run_watched(resident, sequences, watches)
        for layer, each in zip(batch, moments, strict=True):
            rows = activation_weights(layer)
            labels = balanced_kmeans(unit_rows(rows), measurement.experts, layer_rng(len(experts)))
            means = np.stack([rows[labels == expert].mean(axis=0) for expert in range(measurement.experts)])
            square = each.covariance
            centres = torch.from_numpy(unit_rows(means)).to(square)
            experts.append(labels.astype(np.uint8))
            weights.append((centres * logit_scale(centres, square)).float().cpu().numpy())
    return Calibration(
        {
            "moefication_experts": np.stack(experts),
            "moefication_weight": np.stack(weights),
            "moefication_bias": np.zeros((len(layers), measurement.experts), dtype=np.float32),
        }
    )


def calibrate_cmoe(resident: Resident, sequences: Sequence[Tokens], measurement: CmoeMeasurement) -> Calibration:
    """Partition every network as CMoE does.

    Returns:
        - `cmoe_experts` uint8 [layers, width], the expert of every neuron, shared experts first.
        - `cmoe_weight` float32 [layers, N, hidden] and `cmoe_bias` float32 [layers, N], routers scaled so that the
          logits of experts that aren't shared have standard deviation 1 over tokens. Those of shared experts are
          `SHARED_BIAS`.
    """
    layers = resident.dense_layers
    partitions = []
    for batch in memory_batches(layers, lambda layer: 4 * layer.width**2):
        counts = [torch.zeros(layer.width, layer.width, device=layer.down.weight.device) for layer in batch]
        callbacks = [partial(_count_activated, each, measurement.firing) for each in counts]
        watch_networks(resident, sequences, list(zip(batch, callbacks, strict=True)))
        partitions += [
            partition_neurons(each.cpu().numpy().astype(np.float64), measurement.experts, measurement.shared)
            for each in counts
        ]
    weights, biases = _cmoe_routers(
        resident, sequences, measurement, [representatives for _, representatives in partitions]
    )
    return Calibration(
        {
            "cmoe_experts": np.stack([experts for experts, _ in partitions]).astype(np.uint8),
            "cmoe_weight": np.stack(weights).astype(np.float32),
            "cmoe_bias": np.stack(biases).astype(np.float32),
        }
    )


def _count_activated(counts: Tensor, firing: int, inputs: Tensor, activations: Tensor) -> None:
    largest = activations.float().abs().topk(firing, dim=1).indices
    activated = torch.zeros_like(activations, dtype=torch.float32).scatter_(1, largest, 1.0)
    counts += activated.t() @ activated


def partition_neurons(
    counts: NDArray[np.float64], experts: int, shared: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Partition neurons by the tokens that activate them (CMoE).

    A neuron is a vector over tokens, 1 where it is activated, and a cluster's centre c is the mean of its members. The
    L1 distance of a vector a of zeros and ones to c is `|a| + |c| - 2 a c`, so joint counts determine all distances.
    The first centres are the most often activated neurons that aren't shared.

    Args:
        counts: Number of tokens that activate both of two neurons, float64 [width, width].
        experts: Number of experts N, a divisor of the width.
        shared: Number of shared experts, fewer than N.

    Returns:
        Expert of every neuron, int64 [width], shared experts first; and the representative neurons of the other
        experts, int64 [N - shared].
    """
    rates, size = counts.diagonal(), len(counts) // experts
    order = np.argsort(-rates, kind="stable")
    common, routed = np.sort(order[: shared * size]), np.sort(order[shared * size :])
    members = [np.array([neuron]) for neuron in order[shared * size : shared * size + experts - shared]]
    clusters = np.full(len(routed), -1)
    for _ in range(_ROUNDS):
        distances = _distances(counts, routed, members)
        fresh = optimal_assignment(distances, size)
        if np.array_equal(fresh, clusters):
            break
        clusters = fresh
        members = [routed[clusters == cluster] for cluster in range(experts - shared)]
    distances = _distances(counts, routed, members)
    nearest = [int(distances[clusters == c, c].argmin()) for c in range(len(members))]
    found = np.empty(len(counts), dtype=np.int64)
    found[common], found[routed] = np.arange(len(common)) // size, shared + clusters
    return found, np.array([each[place] for each, place in zip(members, nearest, strict=True)])


def _distances(
    counts: NDArray[np.float64], neurons: NDArray[np.int64], clusters: Sequence[NDArray[np.int64]]
) -> NDArray[np.float64]:
    """L1 distances of neurons to the centres of clusters, [neurons, clusters]."""
    rates = counts.diagonal()
    # Sums of integers are exact in any order, and a matrix product avoids copying most of the counts.
    belongs = np.zeros((len(counts), len(clusters)))
    for cluster, members in enumerate(clusters):
        belongs[members, cluster] = 1.0
    products = (counts @ belongs)[neurons] / [len(members) for members in clusters]
    sizes = np.array([rates[members].mean() for members in clusters])
    return np.asarray(rates[neurons][:, None] + sizes - 2 * products)


def _cmoe_routers(
    resident: Resident,
    sequences: Sequence[Tokens],
    measurement: CmoeMeasurement,
    representatives: Sequence[NDArray[np.int64]],
) -> tuple[list[NDArray[np.float64]], list[NDArray[np.float64]]]:
    """Weights [N, hidden] and biases [N] of every network's router."""
    weights: list[NDArray[np.float64]] = []
    biases: list[NDArray[np.float64]] = []
    for batch in memory_batches(resident.dense_layers, lambda layer: 8 * layer.hidden**2):
        routed = measurement.experts - measurement.shared
        statistics = [InputStatistics(layer.hidden, routed, layer.up.weight.device) for layer in batch]
        chosen = representatives[len(weights) : len(weights) + len(batch)]
        watchers: list[tuple[DenseLayer, partial[None]]] = [
            (layer, partial(_add_representatives, each, torch.from_numpy(neurons)))
            for layer, each, neurons in zip(batch, statistics, chosen, strict=True)
        ]
        watch_networks(resident, sequences, watchers)
        for each in statistics:
            weight, bias = each.ridge(measurement.ridge, True)
            scale = logit_scale(weight, each.covariance)
            # Subtracting a common bias changes no choice, and keeps all logits far below a shared expert's.
            routed_weight, routed_bias = (part.cpu().numpy() for part in (weight * scale, (bias - bias.mean()) * scale))
            weights.append(np.concatenate([np.zeros((measurement.shared, weight.shape[1])), routed_weight]))
            biases.append(np.concatenate([np.full(measurement.shared, SHARED_BIAS), routed_bias]))
    return weights, biases


def _add_representatives(statistics: InputStatistics, neurons: Tensor, inputs: Tensor, activations: Tensor) -> None:
    statistics.add_pairs(inputs, activations[:, neurons.to(activations.device)].abs())
