"""The start of ToMoE genomes: experts of networks, saliencies of neurons and head dimensions, and directions of inputs.

The paper (ToMoE, arXiv 2501.15316) learns masks and routers by gradient descent from a random start. A search without
gradients starts from experts that are fitted to the calibration's tokens (`moevolve.workers.methods.tomoe.experts`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from moevolve.kernels.expert_ffn import activations
from moevolve.workers.contract.edits import Calibration, Tokens
from moevolve.workers.contract.methods import Resident
from moevolve.workers.families.layers import DenseLayer
from moevolve.workers.methods.shared.dense import weights_of
from moevolve.workers.methods.shared.input_statistics import InputMoments, memory_batches, principal_directions
from moevolve.workers.methods.shared.passes import Watch, run_watched
from moevolve.workers.methods.tomoe.edit import ToMoeMeasurement
from moevolve.workers.methods.tomoe.experts import fit_experts

# Tokens whose activations are held in float64 at once.
_ROWS = 1024


def calibrate_tomoe(resident: Resident, sequences: Sequence[Tokens], measurement: ToMoeMeasurement) -> Calibration:
    """Measure saliencies and directions of every layer, and fit experts.

    Returns:
        Float32 arrays:

        - `network_directions` [layers, 1 + components, hidden] and `expert_rows` [layers, N, 1 + components], the
          routers of the fitted experts; see `fit_experts`.
        - `expert_saliency` [layers, N, width], mean squared contributions of neurons on the tokens of each expert, as
          shares of a token's sum over neurons.
        - `network_sample` [layers, tokens, 1 + components], coordinates of a sample of the networks' inputs.
        - `neuron_saliency` [layers, width], mean squared contributions of neurons to the output, with the weights of a
          norm behind it.
        - `network_share` [layers], mean square of what the network adds relative to the squared residual stream behind.
        - `neuron_fluctuation` [layers, width], sample variances of activations times squared norms of output weights,
          the metric of FLAP (arXiv 2312.11983).
        - With `measurement.attention` also `head_directions` [layers, components, hidden], the principal directions of
          the attentions' inputs, orthogonal to the mean, `head_sample`, `pair_saliency` [layers, head_dim / 2] and
          `value_saliency` [layers, head_dim].
    """
    layers = resident.dense_layers
    tokens = sum(map(len, sequences))
    found: list[dict[str, Tensor]] = []
    for batch in memory_batches(layers, lambda layer: layer.up.weight.element_size() * tokens * layer.hidden):
        found += _measure_networks(resident, sequences, batch, measurement)
    arrays = {name: [each[name] for each in found] for name in found[0]}
    if measurement.attention:
        heads = [_Heads(layer, measurement, tokens) for layer in layers]
        for group in memory_batches(heads, lambda site: 8 * site.reads.in_features**2):
            _find_directions(resident, sequences, group, measurement.components)
        run_watched(resident, sequences, [watch for each in heads for watch in each.watches()])
        arrays |= {
            "head_directions": [each.directions for each in heads],
            "head_sample": [torch.cat(each.sample) for each in heads],
            "pair_saliency": [each.pair_saliency() / tokens for each in heads],
            "value_saliency": [each.value_saliency() / tokens for each in heads],
        }
    return Calibration({name: torch.stack(each).float().cpu().numpy() for name, each in arrays.items()})


def _measure_networks(
    resident: Resident, sequences: Sequence[Tokens], layers: Sequence[DenseLayer], measurement: ToMoeMeasurement
) -> list[dict[str, Tensor]]:
    """Return the networks' arrays for each of some layers."""
    tokens = sum(map(len, sequences))
    sites = [_Network(layer, tokens) for layer in layers]
    run_watched(resident, sequences, [watch for each in sites for watch in each.watches()])
    found = []
    while sites:
        site = sites.pop(0)  # its inputs are freed after it
        found.append({"network_share": site.share(), **_measure_network(site.layer, site.inputs, measurement)})
    return found


class _Network:
    """A network's inputs, [tokens, hidden], and the squared lengths of its outputs and of the stream behind it.

    All are allocated before the pass. Pieces of them, kept among what a pass frees, would tear the heap into holes, and
    took a gigabyte more.
    """

    def __init__(self, layer: DenseLayer, tokens: int) -> None:
        weight = layer.up.weight
        self.layer = layer
        self.inputs = torch.empty(tokens, layer.hidden, dtype=weight.dtype, device=weight.device)
        self._outputs, self._streams = torch.empty(2, tokens, dtype=torch.float64, device=weight.device)
        self._filled = 0

    def watches(self) -> list[Watch]:
        return [
            Watch(self.layer.inner[-1], self._add_inputs),
            Watch(self.layer.output_norm or self.layer.down, self._add_outputs, output=True),
            Watch(self.layer.decoder_layer, self._add_streams, output=True),
        ]

    def _add_inputs(self, values: Tensor) -> None:
        self.inputs[self._filled : self._filled + len(values)] = values

    def _add_outputs(self, values: Tensor) -> None:
        self._outputs[self._filled : self._filled + len(values)] = values.double().square().sum(dim=1)

    def _add_streams(self, values: Tensor) -> None:
        self._streams[self._filled : self._filled + len(values)] = values.double().square().sum(dim=1)
        self._filled += len(values)

    def share(self) -> Tensor:
        """Mean squared output relative to the squared stream."""
        return self.layer.output_scale**2 * (self._outputs / self._streams).mean()


@torch.inference_mode()
def _measure_network(layer: DenseLayer, inputs: Tensor, measurement: ToMoeMeasurement) -> dict[str, Tensor]:
    """Return what is measured of a network on its inputs, [tokens, hidden]."""
    norms = (layer.gains[:, None] * layer.down.weight.double()).square().sum(dim=0)
    contributions = torch.empty(len(inputs), layer.width, device=inputs.device)
    saliency, sums = torch.zeros_like(norms), torch.zeros_like(norms)
    for start in range(0, len(inputs), _ROWS):
        rows = slice(start, start + _ROWS)
        values = activations(inputs[rows], weights_of(layer), slice(None)).double()
        squares = values.square() * norms
        saliency += squares.sum(dim=0)
        sums += values.sum(dim=0)
        contributions[rows] = squares / squares.sum(dim=1, keepdim=True).clamp_min(torch.finfo().tiny)
    experts, kept = measurement.experts, max(1, int(measurement.share * layer.width))
    directions, expert_rows, saliencies = fit_experts(inputs, contributions, experts, kept, measurement.components)
    tokens = len(inputs)
    fluctuation = (saliency - sums.square() / tokens * norms).clamp_min(0) / max(1, tokens - 1)
    return {
        "network_directions": directions,
        "expert_rows": expert_rows,
        "expert_saliency": saliencies,
        "network_sample": inputs[:: -(-tokens // measurement.sample)].double() @ directions.t(),
        "neuron_saliency": saliency / tokens,
        "neuron_fluctuation": fluctuation,
    }


class _Heads:
    """The magnitudes of an attention's query and key pairs, the contributions of its values, and its inputs."""

    def __init__(self, layer: DenseLayer, measurement: ToMoeMeasurement, tokens: int) -> None:
        attention: Any = layer.attention
        self.reads: nn.Linear = attention.q_proj
        self.directions = torch.empty(0)
        self.sample: list[Tensor] = []
        self._attention = attention
        self._stride, self._seen = -(-tokens // measurement.sample), 0
        self._head_dim = int(attention.head_dim)
        self._sums: dict[str, Tensor] = {}

    def watches(self) -> list[Watch]:
        return [
            Watch(self.reads, self._add_input),
            Watch(self._attention.q_proj, partial(self._add_squares, "query"), output=True),
            Watch(self._attention.k_proj, partial(self._add_squares, "key"), output=True),
            Watch(self._attention.o_proj, partial(self._add_squares, "output")),
        ]

    def _add_input(self, inputs: Tensor) -> None:
        rows = inputs[-self._seen % self._stride :: self._stride]
        self.sample.append(rows.double() @ self.directions.t())
        self._seen += len(inputs)

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


def _find_directions(resident: Resident, sequences: Sequence[Tokens], sites: Sequence[_Heads], components: int) -> None:
    moments = [InputMoments(site.reads.in_features, site.reads.weight.device) for site in sites]
    run_watched(resident, sequences, [Watch(site.reads, each.add) for site, each in zip(sites, moments, strict=True)])
    for site, each in zip(sites, moments, strict=True):
        site.directions = principal_directions(_without_mean(each), components)


def _without_mean(moments: InputMoments) -> Tensor:
    """Return the covariance of the inputs' parts orthogonal to their mean, [hidden, hidden]."""
    length = float(moments.mean.norm())
    unit = moments.mean / length if length > 0 else moments.mean
    along = moments.covariance @ unit
    # (I - u u^T) C (I - u u^T) without matrix products.
    shift = torch.outer(unit, along - unit * (unit @ along) / 2)
    return moments.covariance - shift - shift.t()
