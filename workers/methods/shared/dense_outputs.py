"""The output projections of edited feed-forward networks and attentions, as the repair fits them.

Their features are their inputs, zero for neurons that aren't active for a token. The repair changes copies of the
weights, never those that were loaded.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from moevolve.evaluators.errors import UserError
from moevolve.kernels.expert_ffn import activations
from moevolve.workers.families.layers import DenseLayer, Replacement
from moevolve.workers.methods.shared.dense import weights_of
from moevolve.workers.methods.shared.outputs import (
    BLOCK_COLUMNS,
    FeatureBlock,
    Features,
    Network,
    Recorded,
    padded,
    recording,
)


class CopyOnWriteWeights:
    """A linear layer's weights, which an edit changes in a copy."""

    def __init__(self, linear: nn.Linear) -> None:
        self._linear = linear
        self._loaded: Tensor | None = None

    def add(self, columns: slice, change: Tensor) -> Tensor:
        self._use_copy()
        part = self._linear.weight.data[:, columns]
        before = part.to(torch.float32, copy=True)
        part.copy_(before + change.t())
        return (part.float() - before).t()

    def part(self, columns: slice) -> Tensor:
        """Return a view of the weights in use of some inputs, [columns, outputs]."""
        return self._linear.weight.data[:, columns].t()

    def use(self, columns: slice, weights: Tensor) -> None:
        """Use weights [columns, outputs] of some inputs in place of the loaded ones."""
        self._use_copy()
        self.part(columns).copy_(weights)

    @property
    def weight(self) -> Tensor:
        """The weight in use, [outputs, inputs]."""
        return self._linear.weight.data

    def replace(self, weight: Tensor) -> None:
        """Use a weight [outputs, inputs] in place of the loaded one."""
        self._use_copy()
        self._linear.weight.data.copy_(weight)

    def restore(self) -> None:
        """Use the loaded weights again."""
        if self._loaded is not None:
            self._linear.weight = self._loaded
            self._loaded = None

    @torch.inference_mode(False)  # a copy that is made during a forward pass must stay writable after it
    def _use_copy(self) -> None:
        if self._loaded is None:
            self._loaded = self._linear.weight
            self._linear.weight = nn.Parameter(self._linear.weight.data.clone(), requires_grad=False)


@dataclass(frozen=True, slots=True, eq=False)
class NetworkCopies:
    """A network's weights: of its output projection, and of `DenseLayer.inner`."""

    down: CopyOnWriteWeights
    inner: tuple[CopyOnWriteWeights, ...]

    @classmethod
    def of(cls, layer: DenseLayer) -> NetworkCopies:
        return cls(CopyOnWriteWeights(layer.down), tuple(map(CopyOnWriteWeights, layer.inner)))

    def restore(self) -> None:
        """Use the loaded weights again."""
        for each in (self.down, *self.inner):
            each.restore()


@dataclass(frozen=True, slots=True, eq=False)
class ActiveMask:
    """The neurons of a network that are active for each token.

    Attributes:
        chosen: Experts of each token, bool [tokens, N].
        kept: Neurons of each expert, bool [N, width].
        unit: Size of consecutive groups of neurons; a block of features stays within one group.
    """

    chosen: Tensor
    kept: Tensor
    unit: int

    def on(self, columns: slice) -> tuple[Tensor, Tensor | None]:
        """Tokens for which any neuron of some columns is active, int64 [t], and their mask, bool [t, columns].

        The mask is None if all these neurons are active for all these tokens.
        """
        kept = self.kept[:, columns]
        experts = kept.any(dim=1)
        tokens = self.chosen[:, experts].any(dim=1).nonzero()[:, 0]
        if bool(kept[experts].all()):
            return tokens, None
        return tokens, self.chosen[tokens].float() @ kept.float() > 0


class MaskingNetwork(nn.Module, ABC):
    """A module in the place of a network, which runs some of its neurons for each token."""

    @abstractmethod
    def active_mask(self, hidden: Tensor) -> ActiveMask:
        """Return the active neurons for hidden states [tokens, hidden]."""


class _DenseOutput:
    """The linear map whose features are the first input of a module, and whose weights are copied before changes."""

    def __init__(self, layer: DenseLayer, weights: CopyOnWriteWeights, input_module: nn.Module) -> None:
        self._layer, self._input_module = layer, input_module
        self.add, self.weights, self.use = weights.add, weights.part, weights.use

    @property
    def layer(self) -> int:
        return self._layer.index

    def prepare(self, selects: bool) -> None:
        """Weights are copied at their first change."""

    def recording(self) -> AbstractContextManager[list[Recorded]]:
        return recording(self._input_module, lambda inputs, _: (inputs,))


class NetworkOutput(_DenseOutput):
    """The down projection of one feed-forward network as a `LayerOutput`; `network`, if any, runs in its place."""

    def __init__(
        self, layer: DenseLayer, weights: NetworkCopies, replacement: Replacement, network: MaskingNetwork | None
    ) -> None:
        super().__init__(layer, weights.down, layer.inner[-1] if network is None else network)
        self._inner, self._replacement = weights.inner, replacement
        self._active_mask = None if network is None else network.active_mask
        self.next_part = layer.output_norm

    def features(self, recorded: Recorded) -> Features:
        (hidden,) = recorded
        active = None if self._active_mask is None else self._active_mask(hidden)
        return Features(self._layer.width, [*_network_blocks(self._layer, hidden, active)])

    def networks(self, recorded: Recorded) -> Iterator[Network]:
        (hidden,) = recorded
        network, width = weights_of(self._layer), self._layer.width
        tokens, factor = torch.arange(len(hidden), device=hidden.device), hidden.new_ones(len(hidden), 1)
        if self._active_mask is not None:
            active = self._active_mask(hidden)
            tokens, mask = active.on(slice(0, width))
            factor = factor[tokens] if mask is None else mask
        factor = factor * self._layer.output_scale
        inner = [(network.up, network.up_bias)]
        if network.gate is not None:
            inner.insert(0, (network.gate, network.gate_bias))
        weight = torch.cat([each for each, _ in inner])
        bias = None if network.up_bias is None else torch.cat([each for _, each in inner if each is not None])
        neurons = torch.arange(width, device=hidden.device).repeat(len(inner))

        def activate(rows: Tensor) -> Tensor:
            first, *ups = rows.split(width, dim=1)
            return network.activation(first) * ups[0] if ups else network.activation(first)

        inputs = hidden[tokens]
        yield Network(tokens, inputs, factor.float(), weight, bias, network.down.t(), neurons, activate)
        self.use_inputs(weight.split([len(each.weight) for each in self._inner]))

    def inputs(self) -> list[Tensor]:
        return [each.weight for each in self._inner]

    def use_inputs(self, weights: Sequence[Tensor]) -> None:
        for copy, weight in zip(self._inner, weights, strict=True):
            copy.replace(weight)


class NormalisedOutput(NetworkOutput):
    """The down projection of a network whose output is normalised before it is added to the residual stream.

    As a `PartOutput` it is fitted to what enters the norm in the unedited model, in which alone it is linear.
    """

    def unedited(self) -> AbstractContextManager[None]:
        return self._replacement.removed()

    def gains(self, target: Tensor) -> Tensor:
        """How many times a token's square is larger behind the norm."""
        assert self.next_part is not None
        before, after = (each.float().square().sum(dim=1) for each in (target, self.next_part(target)))
        return after / before.clamp_min(torch.finfo().tiny)


def network_output(
    layer: DenseLayer, weights: NetworkCopies, replacement: Replacement, network: MaskingNetwork | None
) -> NetworkOutput:
    """Return the output of a layer's network, or of the `network` in its place."""
    kind = NetworkOutput if layer.output_norm is None else NormalisedOutput
    return kind(layer, weights, replacement, network)


def _network_blocks(layer: DenseLayer, hidden: Tensor, active: ActiveMask | None) -> Iterator[FeatureBlock]:
    """Features of a network on inputs [tokens, hidden]: its neurons in their current order. `active` None: all are."""
    network, all_tokens = weights_of(layer), torch.arange(len(hidden), device=hidden.device)
    unit = layer.width if active is None else active.unit
    for first in range(0, layer.width, unit):
        for start in range(first, first + unit, BLOCK_COLUMNS):
            columns = slice(start, min(start + BLOCK_COLUMNS, first + unit))
            tokens, mask = (all_tokens, None) if active is None else active.on(columns)
            if not len(tokens):
                continue
            values = activations(hidden[padded(tokens, hidden, columns.stop - columns.start)], network, columns)
            if mask is not None:
                values[: len(tokens)] *= mask
            if layer.output_scale != 1.0:
                values *= layer.output_scale
            yield FeatureBlock(columns, tokens, values)


class AttentionOutput(_DenseOutput):
    """The output projection of one attention as a `PartOutput`; `without_edit` is its `unedited`."""

    def __init__(
        self, layer: DenseLayer, weights: CopyOnWriteWeights, without_edit: Callable[[], AbstractContextManager[None]]
    ) -> None:
        projection = layer.attention.o_proj
        assert isinstance(projection, nn.Module)
        super().__init__(layer, weights, projection)
        self.unedited = without_edit

    def gains(self, target: Tensor) -> None:
        """No norm is between the output and the stream."""

    @property
    def next_part(self) -> nn.Module:
        part = self._layer.decoder_layer.post_attention_layernorm
        assert isinstance(part, nn.Module)
        return part

    def features(self, recorded: Recorded) -> Features:
        (values,) = recorded
        tokens, width = torch.arange(len(values), device=values.device), values.shape[1]
        parts = [slice(start, min(start + BLOCK_COLUMNS, width)) for start in range(0, width, BLOCK_COLUMNS)]
        return Features(width, [FeatureBlock(part, tokens, values[:, part]) for part in parts])


def check_additive(layer: DenseLayer) -> None:
    """Refuse a layer that normalises the sum of its network's output and the residual stream."""
    if not getattr(layer.decoder_layer, "do_layer_norm_before", True):
        raise UserError(
            f"{layer.family.title} models that normalise behind their networks (do_layer_norm_before: false) can't be "
            "repaired: what a network gives isn't added to the residual stream"
        )
