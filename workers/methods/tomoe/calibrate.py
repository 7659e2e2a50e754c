"""The start of ToMoE genomes: saliencies of neurons and head dimensions, and directions of inputs for routers.

The paper (ToMoE, arXiv 2501.15316) learns masks and routers by gradient descent from a random start. A search without
gradients starts from saliencies: a neuron's mean squared contribution to its network's output, and its linear
dependence on the token's coordinates along the principal directions of the network's inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from moevolve.workers.contract.edits import Calibration, Tokens
from moevolve.workers.contract.methods import Resident
from moevolve.workers.families.layers import DenseLayer
from moevolve.workers.methods.shared.input_statistics import InputMoments, memory_batches, principal_directions
from moevolve.workers.methods.shared.passes import Watch, run_watched
from moevolve.workers.methods.tomoe.edit import ToMoeMeasurement


def calibrate_tomoe(resident: Resident, sequences: Sequence[Tokens], measurement: ToMoeMeasurement) -> Calibration:
    """Measure saliencies and directions of every layer.

    Returns:
        Float32 arrays:

        - `network_directions` [layers, 1 + components, hidden], the mean input's direction, then the principal
          directions orthogonal to it, scaled so that inputs' coordinates have mean square 1.
        - `network_sample` [layers, tokens, 1 + components], such coordinates of a sample of tokens.
        - `neuron_saliency` [layers, width], mean squared contributions of neurons to the output.
        - `neuron_slopes` [layers, width, components], regression coefficients of squared contributions on coordinates.
        - `neuron_fluctuation` [layers, width], sample variances of activations times squared norms of output weights,
          the metric of FLAP (arXiv 2312.11983).
        - With `measurement.attention` also `head_directions` and `head_sample` (without the mean's direction),
          `pair_saliency` [layers, head_dim / 2] and `value_saliency` [layers, head_dim].
    """
    layers = resident.dense_layers
    networks = [_Network(layer, measurement) for layer in layers]
    heads = [_Heads(layer, measurement) for layer in layers] if measurement.attention else []
    sites: list[_Site] = [*networks, *heads]
    for batch in memory_batches(sites, lambda site: 8 * site.reads.in_features**2):
        _find_directions(resident, sequences, batch, measurement.components)
    tokens = sum(len(each) for each in sequences)
    for site in sites:
        site.begin(tokens)
    run_watched(resident, sequences, [watch for site in sites for watch in site.watches()])
    arrays = {
        "network_directions": [site.directions for site in networks],
        "network_sample": [torch.cat(site.sample) for site in networks],
        "neuron_saliency": [site.saliency / tokens for site in networks],
        "neuron_slopes": [site.slopes / tokens for site in networks],
        "neuron_fluctuation": [site.fluctuation(tokens) for site in networks],
    }
    if heads:
        arrays |= {
            "head_directions": [site.directions[1:] for site in heads],
            "head_sample": [torch.cat(site.sample)[:, 1:] for site in heads],
            "pair_saliency": [site.pair_saliency() / tokens for site in heads],
            "value_saliency": [site.value_saliency() / tokens for site in heads],
        }
    return Calibration({name: torch.stack(each).float().cpu().numpy() for name, each in arrays.items()})


class _Site:
    """A feed-forward network or attention, whose inputs a router reads; the linear layer `reads` has these inputs."""

    def __init__(self, reads: nn.Linear, measurement: ToMoeMeasurement) -> None:
        self.reads = reads
        self._limit = measurement.sample
        self.directions = torch.empty(0)
        self.sample: list[Tensor] = []

    def begin(self, tokens: int) -> None:
        """Prepare for a pass over this many tokens."""
        self._stride = -(-tokens // self._limit)
        self._seen = 0

    def watches(self) -> list[Watch]:
        return [Watch(self.reads, self._add_input)]

    def _add_input(self, inputs: Tensor) -> None:
        self.coordinates = inputs.double() @ self.directions.t()
        self.sample.append(self.coordinates[-self._seen % self._stride :: self._stride])
        self._seen += len(inputs)


class _Network(_Site):
    """The contributions of a feed-forward network's neurons."""

    def __init__(self, layer: DenseLayer, measurement: ToMoeMeasurement) -> None:
        super().__init__(layer.up, measurement)
        self._down = layer.down
        self._norms = layer.down.weight.double().square().sum(dim=0)
        self.saliency = torch.zeros_like(self._norms)
        self.slopes = self.saliency.new_zeros(layer.width, measurement.components)
        self._sums = torch.zeros_like(self._norms)

    def watches(self) -> list[Watch]:
        return [*super().watches(), Watch(self._down, self._add_neurons)]

    def _add_neurons(self, activations: Tensor) -> None:
        contributions = activations.double().square() * self._norms
        self.saliency += contributions.sum(dim=0)
        self._sums += activations.double().sum(dim=0)
        # Coordinates have mean 0 and variance 1, so mean products with them are the regression coefficients.
        self.slopes += contributions.t() @ self.coordinates[:, 1:]

    def fluctuation(self, tokens: int) -> Tensor:
        """Sample variance of activations times squared norms of output weights, [width]; zero for a single token."""
        squares = self.saliency - self._sums.square() / tokens * self._norms
        return squares.clamp_min(0) / max(1, tokens - 1)


class _Heads(_Site):
    """The magnitudes of an attention's query and key pairs, and the contributions of its values."""

    def __init__(self, layer: DenseLayer, measurement: ToMoeMeasurement) -> None:
        attention: Any = layer.attention
        super().__init__(attention.q_proj, measurement)
        self._attention = attention
        self._head_dim = int(attention.head_dim)
        self._sums: dict[str, Tensor] = {}

    def watches(self) -> list[Watch]:
        return [
            *super().watches(),
            Watch(self._attention.q_proj, partial(self._add_squares, "query"), output=True),
            Watch(self._attention.k_proj, partial(self._add_squares, "key"), output=True),
            Watch(self._attention.o_proj, partial(self._add_squares, "output")),
        ]

    def _add_squares(self, name: str, values: Tensor) -> None:
        squares = values.double().square().sum(dim=0)
        self._sums[name] = self._sums[name] + squares if name in self._sums else squares

    def pair_saliency(self) -> Tensor:
        """Root sums of squares of queries times those of keys, summed over heads, [head_dim / 2]."""
        query, key = (self._sums[name].view(-1, 2, self._head_dim // 2).sum(dim=1).sqrt() for name in ("query", "key"))
        return (query.view(len(key), -1, query.shape[1]) * key[:, None]).sum(dim=(0, 1))

    def value_saliency(self) -> Tensor:
        """Squared contributions to the attention's output, summed over tokens and heads, [head_dim]."""
        norms = self._attention.o_proj.weight.double().square().sum(dim=0)
        return (self._sums["output"] * norms).view(-1, self._head_dim).sum(dim=0)


def _find_directions(resident: Resident, sequences: Sequence[Tokens], sites: Sequence[_Site], components: int) -> None:
    moments = [InputMoments(site.reads.in_features, site.reads.weight.device) for site in sites]
    run_watched(resident, sequences, [Watch(site.reads, each.add) for site, each in zip(sites, moments, strict=True)])
    for site, each in zip(sites, moments, strict=True):
        site.directions = input_directions(each.mean, each.moment, components)


def input_directions(mean: Tensor, square: Tensor, components: int) -> Tensor:
    """The mean input's direction, followed by principal directions orthogonal to it.

    A router on these coordinates needs no bias: those along principal directions have mean zero, and the one along the
    mean's direction, much the same for every token, acts as a bias.

    Args:
        mean: Mean input, float64 [hidden].
        square: Second moment of the inputs, float64 [hidden, hidden].
        components: Number of principal directions.

    Returns:
        Directions divided by the root mean square of the inputs' coordinates along them, float64
        [1 + components, hidden]. Rows are zero if inputs vary in fewer directions.
    """
    length = float(mean.norm())
    unit = mean / length if length > 0 else mean
    covariance = square - torch.outer(mean, mean)
    along = covariance @ unit
    # (I - u u^T) C (I - u u^T) without matrix products.
    shift = torch.outer(unit, along - unit * (unit @ along) / 2)
    principal = principal_directions(covariance - shift - shift.t(), components)
    size = float((unit @ square @ unit).sqrt())
    return torch.cat([unit[None] / (size if size > 0 else 1.0), principal])
