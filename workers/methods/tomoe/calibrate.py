"""The start of ToMoE genomes: what every neuron and head dimension contributes, and the directions routers read.

The paper (ToMoE, arXiv 2501.15316) learns masks and routers by gradients from nothing. A search without gradients
starts from saliencies: a neuron's mean squared contribution to its network's output, and how that depends, linearly, on
the token's place along the principal directions of the network's inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from moevolve.evaluators.errors import UserError
from moevolve.workers.contract.edits import Calibration, Tokens
from moevolve.workers.contract.methods import Resident
from moevolve.workers.families.layers import DenseLayer
from moevolve.workers.methods.shared.input_statistics import (
    MEMORY,
    InputMoments,
    Watch,
    principal_directions,
    run_watched,
)
from moevolve.workers.methods.tomoe.edit import ToMoeRecipe


def calibrate_tomoe(resident: Resident, sequences: Sequence[Tokens], recipe: ToMoeRecipe) -> Calibration:
    """Measure the start.

    Returns:
        float32 arrays. `network_directions` [layers, 1 + components, hidden]: the mean input's direction, then the
        principal directions at right angles to it, all scaled so that products with inputs have mean square 1.
        `network_sample` [layers, tokens, 1 + components]: such products of some tokens. `neuron_saliency`
        [layers, width], mean squared contributions, and `neuron_slopes` [layers, width, components], their regression
        on the products. `neuron_fluctuation` [layers, width]: sample variances of activations times the squared norms
        of their output weights, the metric of FLAP (arXiv 2312.11983). With `recipe.attention` also `head_directions`
        and `head_sample` without the mean's direction, `pair_saliency` [layers, head_dim / 2] and `value_saliency`
        [layers, head_dim].

    Raises:
        UserError: no dense networks, or no tokens.
    """
    layers = resident.dense_layers
    if not layers:
        raise UserError("genome.kind: tomoe needs dense feed-forward networks of a family where they are known")
    if not sequences:
        raise UserError("genome.calibration_tokens: there are no prompts to measure the start on")
    networks = [_Network(layer, recipe) for layer in layers]
    heads = [_Heads(layer, recipe) for layer in layers] if recipe.attention else []
    sites: list[_Site] = [*networks, *heads]
    step = max(1, MEMORY // (8 * layers[0].hidden ** 2))
    for start in range(0, len(sites), step):
        _find_directions(resident, sequences, sites[start : start + step], recipe.components)
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
    """One place whose inputs a router reads: a feed-forward network, or an attention."""

    def __init__(self, reads: nn.Linear, recipe: ToMoeRecipe) -> None:
        self.reads = reads
        self._limit = recipe.sample
        self.directions = torch.empty(0)
        self.sample: list[Tensor] = []

    def begin(self, tokens: int) -> None:
        """`tokens` will be seen."""
        self._stride = -(-tokens // self._limit)
        self._seen = 0

    def watches(self) -> list[Watch]:
        return [(self.reads, False, self._take_input)]

    def _take_input(self, inputs: Tensor) -> None:
        self.products = inputs.double() @ self.directions.t()
        self.sample.append(self.products[-self._seen % self._stride :: self._stride])
        self._seen += len(inputs)


class _Network(_Site):
    """A feed-forward network: its neurons' contributions."""

    def __init__(self, layer: DenseLayer, recipe: ToMoeRecipe) -> None:
        super().__init__(layer.up, recipe)
        self._down = layer.down
        self._norms = layer.down.weight.double().square().sum(dim=0)
        self.saliency = torch.zeros_like(self._norms)
        self.slopes = self.saliency.new_zeros(layer.width, recipe.components)
        self._sums = torch.zeros_like(self._norms)

    def watches(self) -> list[Watch]:
        return [*super().watches(), (self._down, False, self._take_neurons)]

    def _take_neurons(self, activations: Tensor) -> None:
        contributions = activations.double().square() * self._norms
        self.saliency += contributions.sum(dim=0)
        self._sums += activations.double().sum(dim=0)
        # The products have mean zero, and variance one: their mean product is the regression.
        self.slopes += contributions.t() @ self.products[:, 1:]

    def fluctuation(self, tokens: int) -> Tensor:
        """Sample variance of every activation in contributions, [width]; zero of a single token."""
        squares = self.saliency - self._sums.square() / tokens * self._norms
        return squares.clamp_min(0) / max(1, tokens - 1)


class _Heads(_Site):
    """An attention: how large its query and key pairs get, and what its values contribute."""

    def __init__(self, layer: DenseLayer, recipe: ToMoeRecipe) -> None:
        attention: Any = layer.attention
        super().__init__(attention.q_proj, recipe)
        self._attention = attention
        self._head_dim = int(attention.head_dim)
        self._sums: dict[str, Tensor] = {}

    def watches(self) -> list[Watch]:
        return [
            *super().watches(),
            (self._attention.q_proj, True, partial(self._take_squares, "query")),
            (self._attention.k_proj, True, partial(self._take_squares, "key")),
            (self._attention.o_proj, False, partial(self._take_squares, "output")),
        ]

    def _take_squares(self, name: str, values: Tensor) -> None:
        squares = values.double().square().sum(dim=0)
        self._sums[name] = self._sums[name] + squares if name in self._sums else squares

    def pair_saliency(self) -> Tensor:
        """Root mean squares of queries times those of keys, summed over heads, [head_dim / 2]."""
        query, key = (self._sums[name].view(-1, 2, self._head_dim // 2).sum(dim=1).sqrt() for name in ("query", "key"))
        return (query.view(len(key), -1, query.shape[1]) * key[:, None]).sum(dim=(0, 1))

    def value_saliency(self) -> Tensor:
        """Mean squared contributions to the attention's output, summed over heads, [head_dim]."""
        norms = self._attention.o_proj.weight.double().square().sum(dim=0)
        return (self._sums["output"] * norms).view(-1, self._head_dim).sum(dim=0)


def _find_directions(resident: Resident, sequences: Sequence[Tokens], sites: Sequence[_Site], components: int) -> None:
    moments = [InputMoments(site.reads.in_features, site.reads.weight.device) for site in sites]
    run_watched(resident, sequences, [(site.reads, False, each.add) for site, each in zip(sites, moments, strict=True)])
    for site, each in zip(sites, moments, strict=True):
        site.directions = input_directions(each.mean, each.moment, components)


def input_directions(mean: Tensor, square: Tensor, components: int) -> Tensor:
    """The mean's direction, then principal directions at right angles to it.

    A router on them needs no bias: products with the principal directions have mean zero, and that with the mean's
    direction, much the same for every token, does a bias's work.

    Args:
        mean: mean input, float64 [hidden].
        square: mean products of inputs, float64 [hidden, hidden].
        components: how many principal directions.

    Returns:
        float64 [1 + components, hidden], each divided by the root mean square of its products with inputs; zero where
        there are fewer directions in which inputs vary.
    """
    length = float(mean.norm())
    unit = mean / length if length > 0 else mean
    covariance = square - torch.outer(mean, mean)
    along = covariance @ unit
    # (I - u u^T) C (I - u u^T), without products of whole matrices.
    shift = torch.outer(unit, along - unit * (unit @ along) / 2)
    principal = principal_directions(covariance - shift - shift.t(), components)
    size = float((unit @ square @ unit).sqrt())
    return torch.cat([unit[None] / (size if size > 0 else 1.0), principal])
