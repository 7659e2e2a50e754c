"""What a repair fits of dense models: the layers that end edited feed-forward networks and attentions.

Their features are what goes into them, zero where it isn't at work for a token. The weights that are fitted are the
edit's own: the model's stay as they were loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from moevolve.evaluators.errors import UserError
from moevolve.kernels.expert_ffn import activations
from moevolve.workers.families.layers import DenseLayer
from moevolve.workers.methods.shared.dense import weights_of
from moevolve.workers.methods.shared.outputs import FeatureBlock

Aside = Callable[[], AbstractContextManager[None]]
"""Takes an edit of a part of a layer away for the length of a `with` block."""


class CopyOnWriteWeights:
    """Lets an edit change a linear layer's weights in a copy, whose memory is taken once."""

    def __init__(self, linear: nn.Linear) -> None:
        self._linear = linear
        self._loaded: Tensor | None = None
        self._own: Tensor | None = None

    def add(self, columns: slice, change: Tensor) -> Tensor:
        """See `LayerOutput.add`."""
        self._show()
        part = self._linear.weight.data[:, columns]
        before = part.to(torch.float32, copy=True)
        part.copy_(before + change.t())
        return (part.float() - before).t()

    def restore(self) -> None:
        """Bring back the loaded weights."""
        if self._loaded is not None:
            self._linear.weight.data = self._loaded
            self._loaded = None

    @torch.inference_mode(False)  # what is made while the model runs must be writable by the next edit
    def _show(self) -> None:
        if self._loaded is None:
            self._loaded = self._linear.weight.data
            if self._own is None:
                self._own = torch.empty_like(self._loaded)
            self._own.copy_(self._loaded)
            self._linear.weight.data = self._own


@dataclass(frozen=True, slots=True, eq=False)
class ActiveMask:
    """Which neurons work for which tokens.

    Attributes:
        chosen: which experts a token has, bool [tokens, N].
        kept: which neurons an expert has, bool [N, width].
        unit: neurons whose experts are the same come so many at a time.
        scale: factor on their activations.
    """

    chosen: Tensor
    kept: Tensor
    unit: int
    scale: float = 1.0

    def of(self, columns: slice) -> tuple[Tensor, Tensor | None]:
        """For some columns the tokens that have any, int64 [t], and which, bool [t, columns]; None for all."""
        kept = self.kept[:, columns]
        experts = kept.any(dim=1)
        tokens = self.chosen[:, experts].any(dim=1).nonzero()[:, 0]
        if bool(kept[experts].all()):
            return tokens, None
        return tokens, self.chosen[tokens].float() @ kept.float() > 0


class NetworkOutput:
    """See `LayerOutput`: the layer out of one feed-forward network.

    Args:
        layer: its handle.
        weights: of its `down`.
        entrance: a module whose first input is the network's.
        at_work: of inputs [tokens, hidden], which neurons work for which; None if all do.
        aside: takes the network's edit away.
    """

    next_part = None

    def __init__(
        self,
        layer: DenseLayer,
        weights: CopyOnWriteWeights,
        entrance: nn.Module,
        at_work: Callable[[Tensor], ActiveMask] | None,
        aside: Aside,
    ) -> None:
        self._layer, self._entrance, self._at_work = layer, entrance, at_work
        self.add, self.unedited = weights.add, aside

    @property
    def layer(self) -> int:
        return self._layer.index

    def watching(self) -> AbstractContextManager[list[tuple[Tensor, ...]]]:
        return inputs_of(self._entrance)

    def features(self, seen: tuple[Tensor, ...]) -> _NetworkFeatures:
        (hidden,) = seen
        return _NetworkFeatures(self._layer, hidden, None if self._at_work is None else self._at_work(hidden))


@dataclass(frozen=True, slots=True, eq=False)
class _NetworkFeatures:
    """See `Features`: columns are neurons as they lie now.

    Attributes:
        layer: of the network.
        hidden: what goes into it, [tokens, hidden].
        at_work: which neurons work; None if all do.
    """

    layer: DenseLayer
    hidden: Tensor
    at_work: ActiveMask | None

    @property
    def width(self) -> int:
        return self.layer.width

    def blocks(self, memory: int) -> Iterator[FeatureBlock]:
        network, work = weights_of(self.layer), self.at_work
        everyone = torch.arange(len(self.hidden), device=self.hidden.device)
        unit = self.width if work is None else work.unit
        # Gate, up and their product, a mask, once more in float32, ordered, times each other; and rows of the weights.
        step = max(1, (memory - self.hidden.nbytes) // (32 * sum(self.hidden.shape)))
        for first in range(0, self.width, unit):
            for start in range(first, first + unit, step):
                columns = slice(start, min(start + step, first + unit))
                tokens, mask = (everyone, None) if work is None else work.of(columns)
                values = activations(self.hidden[tokens], network, columns).float()
                if mask is not None:
                    values *= mask
                if work is not None and work.scale != 1.0:
                    values *= work.scale
                if len(tokens):
                    yield FeatureBlock(columns, tokens, values)


class AttentionOutput:
    """See `LayerOutput`: the output projection of one attention.

    Args:
        layer: its handle.
        weights: of the projection.
        aside: takes the attention's edit away.
    """

    def __init__(self, layer: DenseLayer, weights: CopyOnWriteWeights, aside: Aside) -> None:
        self._layer = layer
        self.add, self.unedited = weights.add, aside

    @property
    def layer(self) -> int:
        return self._layer.index

    @property
    def next_part(self) -> nn.Module:
        part = self._layer.decoder_layer.post_attention_layernorm
        assert isinstance(part, nn.Module)
        return part

    def watching(self) -> AbstractContextManager[list[tuple[Tensor, ...]]]:
        projection = self._layer.attention.o_proj
        assert isinstance(projection, nn.Module)
        return inputs_of(projection)

    def features(self, seen: tuple[Tensor, ...]) -> _Columns:
        return _Columns(seen[0])


@dataclass(frozen=True, slots=True, eq=False)
class _Columns:
    """See `Features`: all columns on all tokens, [tokens, columns]."""

    values: Tensor

    @property
    def width(self) -> int:
        return int(self.values.shape[1])

    def blocks(self, memory: int) -> Iterator[FeatureBlock]:
        everyone = torch.arange(len(self.values), device=self.values.device)
        step = max(1, memory // (12 * len(self.values)))
        for start in range(0, self.width, step):
            columns = slice(start, min(start + step, self.width))
            yield FeatureBlock(columns, everyone, self.values[:, columns].float())


@contextmanager
def inputs_of(module: nn.Module) -> Iterator[list[tuple[Tensor, ...]]]:
    """See `LayerOutput.watching`: a module's first input, as its hooks leave it."""
    found: list[tuple[Tensor, ...]] = []

    def keep(_module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        found.append((args[0].reshape(-1, args[0].shape[-1]),))

    handle = module.register_forward_hook(keep)
    try:
        yield found
    finally:
        handle.remove()


def check_additive(layer: DenseLayer) -> None:
    """Refuse a layer that doesn't add its networks' outputs to the residual stream.

    Raises:
        UserError: it normalises the sum.
    """
    if not getattr(layer.decoder_layer, "do_layer_norm_before", True):
        raise UserError(
            f"{layer.family.title} models that normalise behind their networks (do_layer_norm_before: false) can't be "
            "repaired: what a network gives isn't added to the residual stream"
        )
