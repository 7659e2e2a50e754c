"""CMoE's division and routers, as those of FactorLLM genomes.

Source: CMoE (arXiv 2502.04416), Sec. 3. A token activates the neurons of its largest activations. Those that are
activated most often are shared experts, which every token has. The others are clustered by the tokens that activate
them, in equal clusters, by an exact assignment; each cluster is an expert, and its representative the neuron nearest
its centre. A token goes to the experts whose representatives' activations are the largest.

Of that, a linear router can't give activations of neurons: here it is their ridge regression, in absolute value, on
the network's inputs. A shared expert is one whose bias is larger than any logit. The paper weighs experts alike, as is
done here, until it trains their weights and balances their loads.
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
from moevolve.workers.methods.factorllm.calibrate import batches, logit_scale, networks_to_divide
from moevolve.workers.methods.factorllm.cheapest_assignment import cheapest_assignment
from moevolve.workers.methods.factorllm.edit import CmoeRecipe
from moevolve.workers.methods.shared.input_statistics import InputStatistics, watch_networks

SHARED_BIAS = 1e4
"""Bias of a shared expert; the others' logits vary by 1."""
_ROUNDS = 10


def calibrate_cmoe(resident: Resident, sequences: Sequence[Tokens], recipe: CmoeRecipe) -> Calibration:
    """Divide every network.

    Returns:
        Arrays `cmoe_experts` uint8 [layers, width], shared experts first; `cmoe_weight` float32 [layers, N, hidden] and
        `cmoe_bias` float32 [layers, N], routers scaled so that their logits vary by 1 over tokens, but for those of
        shared experts, which are `SHARED_BIAS`.

    Raises:
        UserError: no dense networks, or no tokens.
    """
    layers = networks_to_divide(resident, sequences)
    divisions = []
    for batch in batches(layers, lambda layer: 4 * layer.width**2):
        counts = [torch.zeros(layer.width, layer.width, device=layer.down.weight.device) for layer in batch]
        watchers = [partial(_count_activated, each, recipe.firing) for each in counts]
        watch_networks(resident, sequences, list(zip(batch, watchers, strict=True)))
        divisions += [divide(each.cpu().numpy().astype(np.float64), recipe.experts, recipe.shared) for each in counts]
    weights, biases = _routers(resident, sequences, recipe, [representatives for _, representatives in divisions])
    return Calibration(
        {
            "cmoe_experts": np.stack([experts for experts, _ in divisions]).astype(np.uint8),
            "cmoe_weight": np.stack(weights).astype(np.float32),
            "cmoe_bias": np.stack(biases).astype(np.float32),
        }
    )


def _count_activated(counts: Tensor, firing: int, inputs: Tensor, activations: Tensor) -> None:
    largest = activations.float().abs().topk(firing, dim=1).indices
    activated = torch.zeros_like(activations, dtype=torch.float32).scatter_(1, largest, 1.0)
    counts += activated.t() @ activated


def divide(counts: NDArray[np.float64], experts: int, shared: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Share out neurons by which tokens activate them.

    A neuron is the vector of the tokens, 1 where it is activated, and a centre is the mean of a cluster's. The L1
    distance of a vector of ones and zeros to a centre c is `|a| + |c| - 2 a c`, so that counts say all of it. The first
    centres are the most often activated neurons that aren't shared.

    Args:
        counts: tokens that activate both of two neurons, float64 [width, width].
        experts: N, dividing the width.
        shared: of these, fewer than N.

    Returns:
        The expert of every neuron, int64 [width], shared experts first; and the representative neurons of the others,
        int64 [N - shared].
    """
    rates, size = counts.diagonal(), len(counts) // experts
    order = np.argsort(-rates, kind="stable")
    common, routed = np.sort(order[: shared * size]), np.sort(order[shared * size :])
    members = [np.array([neuron]) for neuron in order[shared * size : shared * size + experts - shared]]
    clusters = np.full(len(routed), -1)
    for _ in range(_ROUNDS):
        distances = _distances(counts, routed, members)
        fresh = cheapest_assignment(distances, size)
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
    # Sums of whole numbers, exact in any order; products spare copies of most of the counts.
    belongs = np.zeros((len(counts), len(clusters)))
    for cluster, members in enumerate(clusters):
        belongs[members, cluster] = 1.0
    products = (counts @ belongs)[neurons] / [len(members) for members in clusters]
    sizes = np.array([rates[members].mean() for members in clusters])
    return np.asarray(rates[neurons][:, None] + sizes - 2 * products)


def _routers(
    resident: Resident,
    sequences: Sequence[Tokens],
    recipe: CmoeRecipe,
    representatives: Sequence[NDArray[np.int64]],
) -> tuple[list[NDArray[np.float64]], list[NDArray[np.float64]]]:
    """Weights [N, hidden] and biases [N] of every network's router."""
    weights: list[NDArray[np.float64]] = []
    biases: list[NDArray[np.float64]] = []
    for batch in batches(resident.dense_layers, lambda layer: 8 * layer.hidden**2):
        routed = recipe.experts - recipe.shared
        statistics = [InputStatistics(layer.hidden, routed, layer.up.weight.device) for layer in batch]
        chosen = representatives[len(weights) : len(weights) + len(batch)]
        watchers: list[tuple[DenseLayer, partial[None]]] = [
            (layer, partial(_take_representatives, each, torch.from_numpy(neurons)))
            for layer, each, neurons in zip(batch, statistics, chosen, strict=True)
        ]
        watch_networks(resident, sequences, watchers)
        for each in statistics:
            weight, bias = each.ridge(recipe.ridge, True)
            scale = logit_scale(weight, each.covariance)
            # A bias that all have changes nothing; without it, all logits are far from a shared expert's.
            routed_weight, routed_bias = (part.cpu().numpy() for part in (weight * scale, (bias - bias.mean()) * scale))
            weights.append(np.concatenate([np.zeros((recipe.shared, weight.shape[1])), routed_weight]))
            biases.append(np.concatenate([np.full(recipe.shared, SHARED_BIAS), routed_bias]))
    return weights, biases


def _take_representatives(statistics: InputStatistics, neurons: Tensor, inputs: Tensor, activations: Tensor) -> None:
    statistics.add_pairs(inputs, activations[:, neurons.to(activations.device)].abs())
