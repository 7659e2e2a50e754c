"""The start of FactorLLM genomes: a division of every network's neurons, and routers in closed form.

Source: FactorLLM (arXiv 2408.11855), Sec. 3.2 (equal division) and Sec. 3.3 (Prior-Approximate Router): a token's label
are the K experts whose outputs are nearest the whole network's in mean squared error. The paper trains the router on
these labels by cross entropy; here it is their ridge regression on the network's inputs.

With a router for every linear layer (R > 1) the paper gives no labels of their own. The same rule, layer by layer,
does: a router's label are the K slices of its layer whose outputs are nearest the whole layer's. Gate and up layers'
slices give separate neurons, so that the nearest are the largest, the gate's (a plain network's up layer's) behind the
activation; the down layer's slices give what experts give. The error of the network's output with one layer routed
would tell no routers apart: where an activation of zero is zero, it is the same whichever layer lacks a slice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from moevolve.evaluators.errors import UserError
from moevolve.workers.contract.edits import Calibration, Tokens
from moevolve.workers.contract.methods import Resident
from moevolve.workers.families.layers import DenseLayer
from moevolve.workers.methods.factorllm.balanced_kmeans import balanced_kmeans, number_by_first
from moevolve.workers.methods.factorllm.edit import FactorLlmRecipe
from moevolve.workers.methods.shared.input_statistics import (
    MEMORY,
    InputStatistics,
    principal_directions,
    watch_networks,
)


@dataclass(frozen=True)
class _Start:
    """What is measured of one network; float64, `experts` the expert of every neuron."""

    experts: NDArray[np.int64]
    directions: NDArray[np.float64]
    offsets: NDArray[np.float64]
    weight: NDArray[np.float64]
    bias: NDArray[np.float64]


def calibrate_factorllm(resident: Resident, sequences: Sequence[Tokens], recipe: FactorLlmRecipe) -> Calibration:
    """Measure the start of every network.

    Returns:
        Arrays `experts` uint8 [layers, width], the expert of every neuron; `router_weight` float32
        [layers, R, N, hidden] and `router_bias` [layers, R, N], routers in the order gate, up, down, scaled so that a
        router's logits vary by 1 over tokens; `directions` float32 [layers, components, hidden], see
        `principal_directions`; `offsets` float32 [layers, components], the mean input's products with them (zero where
        routers have no bias).

    Raises:
        UserError: no dense networks, or no tokens.
    """
    layers = networks_to_divide(resident, sequences)
    divisions = _divide(resident, sequences, recipe)
    starts: list[_Start] = []
    for batch in batches(layers, lambda layer: 8 * layer.hidden**2):
        chosen = divisions[len(starts) : len(starts) + len(batch)]
        starts += _measure(resident, sequences, recipe, batch, chosen)
    return Calibration(
        {
            "experts": np.stack([start.experts for start in starts]).astype(np.uint8),
            "directions": np.stack([start.directions for start in starts]).astype(np.float32),
            "offsets": np.stack([start.offsets for start in starts]).astype(np.float32),
            "router_weight": np.stack([start.weight for start in starts]).astype(np.float32),
            "router_bias": np.stack([start.bias for start in starts]).astype(np.float32),
        }
    )


def networks_to_divide(resident: Resident, sequences: Sequence[Tokens]) -> Sequence[DenseLayer]:
    """The model's networks.

    Raises:
        UserError: there are none, or no tokens.
    """
    if not resident.dense_layers:
        raise UserError("genome.kind: factorllm needs dense feed-forward networks of a family where they are known")
    if not sequences:
        raise UserError("genome.calibration_tokens: there are no prompts to measure the start on")
    return resident.dense_layers


def _divide(resident: Resident, sequences: Sequence[Tokens], recipe: FactorLlmRecipe) -> list[NDArray[np.int64]]:
    """The expert of every neuron of every network, numbered by their first neurons."""
    layers = resident.dense_layers
    if recipe.partition == "coactivation":
        firing = _firing_profiles(resident, sequences)
        return [balanced_kmeans(each, recipe.experts, layer_rng(i)) for i, each in enumerate(firing)]
    divisions = []
    for i, layer in enumerate(layers):
        if recipe.partition == "kmeans":
            divisions.append(balanced_kmeans(unit_rows(first_weights(layer)), recipe.experts, layer_rng(i)))
        else:
            experts = np.repeat(np.arange(recipe.experts), layer.width // recipe.experts)
            divisions.append(
                number_by_first(layer_rng(i).permutation(experts) if recipe.partition == "shuffled" else experts)
            )
    return divisions


def _firing_profiles(resident: Resident, sequences: Sequence[Tokens]) -> Iterator[NDArray[np.float32]]:
    """Per network, how often every two neurons fire on the same token, rows of unit length: float32 [width, width].

    A neuron fires where its contribution to the output is larger than the token's average neuron's.
    """
    for batch in batches(resident.dense_layers, lambda layer: 4 * layer.width**2):
        counts = [torch.zeros(layer.width, layer.width, device=layer.down.weight.device) for layer in batch]
        watch_networks(
            resident,
            sequences,
            [(layer, partial(_count_firing, each, layer)) for layer, each in zip(batch, counts, strict=True)],
        )
        for each in counts:
            yield unit_rows(each.cpu().numpy())


def _count_firing(counts: Tensor, layer: DenseLayer, inputs: Tensor, activations: Tensor) -> None:
    contributions = activations.float().abs() * layer.down.weight.float().norm(dim=0)
    fires = (contributions > contributions.mean(dim=1, keepdim=True)).float()
    counts += fires.t() @ fires


def _measure(
    resident: Resident,
    sequences: Sequence[Tokens],
    recipe: FactorLlmRecipe,
    layers: Sequence[DenseLayer],
    divisions: Sequence[NDArray[np.int64]],
) -> list[_Start]:
    targets = recipe.routers * recipe.experts
    statistics = [InputStatistics(layer.hidden, targets, layer.up.weight.device) for layer in layers]
    orders = [torch.from_numpy(np.argsort(experts, kind="stable")) for experts in divisions]

    def watch(i: int, inputs: Tensor, activations: Tensor) -> None:
        order = orders[i].to(activations.device)
        labels = [nearest_experts(activations[:, order], layers[i].down.weight[:, order], recipe)]
        if recipe.routers > 1:
            labels = [largest_slices(each[:, order], recipe) for each in _branches(layers[i], inputs)] + labels
        statistics[i].add_pairs(inputs, torch.cat(labels, dim=1))

    watch_networks(resident, sequences, [(layer, partial(watch, i)) for i, layer in enumerate(layers)])
    return [_solve(each, experts, recipe) for each, experts in zip(statistics, divisions, strict=True)]


def nearest_experts(activations: Tensor, down: Tensor, recipe: FactorLlmRecipe) -> Tensor:
    """Labels: 1 for the K experts whose outputs are nearest the whole network's, else 0.

    An output bias belongs to every expert's output as to the whole's (Eq. 7), and so cancels.

    Args:
        activations: [tokens, width], neurons in order of experts.
        down: [hidden, width], likewise.
        recipe: N, K and the factor on experts' outputs.

    Returns:
        float32 [tokens, N].
    """
    tokens = len(activations)
    parts = activations.view(tokens, recipe.experts, -1).float()
    matrices = down.float().view(len(down), recipe.experts, -1)
    outputs = torch.einsum("tnw,dnw->ntd", parts, matrices)
    distances = (outputs * recipe.output_scale - outputs.sum(dim=0)).square().sum(dim=-1).t()
    nearest = distances.topk(recipe.active, dim=1, largest=False).indices
    return torch.zeros_like(distances).scatter_(1, nearest, 1.0)


def largest_slices(values: Tensor, recipe: FactorLlmRecipe) -> Tensor:
    """Labels: 1 for the K slices of a layer into the network whose outputs are nearest the whole layer's, else 0.

    A slice's output is the layer's with zeros in the other neurons' places, and its squared distance what those add up
    to. The factor on experts' outputs is the network's output's.

    Args:
        values: what the layer hands on, [tokens, width], neurons in order of experts.
        recipe: N and K.

    Returns:
        float32 [tokens, N].
    """
    sizes = values.view(len(values), recipe.experts, -1).float().square().sum(dim=-1)
    return torch.zeros_like(sizes).scatter_(1, sizes.topk(recipe.active, dim=1).indices, 1.0)


def _branches(layer: DenseLayer, inputs: Tensor) -> list[Tensor]:
    """What the layers into a network hand on, [tokens, width] each: gate's, if there is one, then up's."""
    # Not by calling the modules, which are being watched.
    linears = [layer.up] if layer.gate is None else [layer.gate, layer.up]
    first, *rest = (nn.functional.linear(inputs, linear.weight, linear.bias) for linear in linears)
    return [layer.activation(first), *rest]


def _solve(statistics: InputStatistics, experts: NDArray[np.int64], recipe: FactorLlmRecipe) -> _Start:
    square = statistics.covariance if recipe.router_bias else statistics.moment
    weight, bias = statistics.ridge(recipe.ridge, recipe.router_bias)
    weight, bias = weight.reshape(recipe.routers, recipe.experts, -1), bias.reshape(recipe.routers, recipe.experts)
    scale = logit_scale(weight, square)
    directions = principal_directions(square, recipe.components)
    offsets = directions @ statistics.mean if recipe.router_bias else directions.new_zeros(len(directions))
    measured = directions, offsets, weight * scale[:, None, None], bias * scale[:, None]
    return _Start(experts, *(each.cpu().numpy() for each in measured))


def logit_scale(weight: Tensor, square: Tensor) -> Tensor:
    """What makes routers' logits vary by 1 over tokens, [...]; the largest stay the largest whatever the scale.

    Args:
        weight: of the routers, float64 [..., N, hidden].
        square: covariance of the inputs, or their mean products, float64 [hidden, hidden].
    """
    spread = (weight @ square * weight).sum(dim=-1).mean(dim=-1).clamp_min(0).sqrt()
    return 1 / torch.where(spread > 1e-9, spread, 1.0)


def batches(layers: Sequence[DenseLayer], size: Callable[[DenseLayer], int]) -> Iterator[Sequence[DenseLayer]]:
    """Consecutive layers whose statistics fit into `MEMORY` together, one at least."""
    step = max(1, MEMORY // size(layers[0]))
    for start in range(0, len(layers), step):
        yield layers[start : start + step]


def first_weights(layer: DenseLayer) -> NDArray[np.float32]:
    """What goes through the activation: the gate's weights, or a plain network's up layer's, [width, hidden]."""
    weights: NDArray[np.float32] = (layer.up if layer.gate is None else layer.gate).weight.float().cpu().numpy()
    return weights


def unit_rows(rows: NDArray[np.float32]) -> NDArray[np.float32]:
    """Rows of length 1; those of zeros stay."""
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    return (rows / np.where(lengths > 0, lengths, 1)).astype(np.float32, copy=False)


def layer_rng(layer: int) -> np.random.Generator:
    """A generator per layer, always the same: the start is no random individual."""
    return np.random.Generator(np.random.Philox(key=layer))
