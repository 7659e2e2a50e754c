"""What a method offers the repair: the linear maps that end parts of decoder layers, with an edit on the model."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from moevolve.kernels.products import widens
from moevolve.workers.contract.methods import Applicator

# Tensors recorded during a pass, from which features are computed; tokens are the first dimension of each.
Recorded = tuple[Tensor, ...]


# Most columns of a block of features.
BLOCK_COLUMNS = 1024
# Fewest columns of a block whose products take matrix units: on a CPU, code is compiled for every shape first.
_WIDE = 256
# Rows of such a product are a multiple of this, since that code stays in memory: with 32 experts, each with its own
# number of tokens, a process would grow by 0.1 GB with every fit of a layer.
_ROWS = 128


@dataclass(frozen=True, slots=True, eq=False)
class FeatureBlock:
    """Some columns of the features, on the tokens where they aren't all zero.

    Attributes:
        columns: Columns of the features, at most `BLOCK_COLUMNS`.
        tokens: Indices of the tokens, int64 [t], ascending.
        values: Features in the model's dtype, [t, columns]; rows behind the first t are padding (`padded`).
    """

    columns: slice
    tokens: Tensor
    values: Tensor

    def add_to(self, stream: Tensor, weights: Tensor) -> None:
        """Add the product with weights [columns, outputs] to a stream, float32 [all tokens, outputs], in place."""
        given = self._product(self.values, weights)[: len(self.tokens)]
        if len(self.tokens) == len(stream):
            stream.add_(given)
        else:
            stream.index_add_(0, self.tokens, given)

    def back(self, stream: Tensor) -> Tensor:
        """Return the product of the transposed features with a stream [all tokens, outputs], [columns, outputs]."""
        own = stream if len(self.tokens) == len(stream) else stream.index_select(0, self.tokens)
        if len(own) < len(self.values):
            own = nn.functional.pad(own, (0, 0, 0, len(self.values) - len(own)))
        return self._product(self.values.t(), own)

    def _product(self, first: Tensor, second: Tensor) -> Tensor:
        dtype = products_dtype(self.values, self.values.shape[1])
        return (first.to(dtype) @ second.to(dtype)).float()


def products_dtype(values: Tensor, width: int) -> torch.dtype:
    """Return the dtype of products with values of a model, of at least `width` rows and columns.

    It is float32, but bfloat16 for wide bfloat16 values where there are matrix units: rounding the other factor lets
    them compute ten times faster. A CPU without them takes 36 times as long for bfloat16.
    """
    if values.dtype != torch.bfloat16 or width < _WIDE or (values.device.type == "cpu" and widens(values.dtype)):
        return torch.float32
    return torch.bfloat16


def padded(places: Tensor, values: Tensor, width: int) -> Tensor:
    """Return indices of rows of `values` for products of some width, with as many more, all 0, as their code needs."""
    if values.device.type != "cpu" or products_dtype(values, width) != torch.bfloat16:
        return places
    return nn.functional.pad(places, (0, -len(places) % _ROWS))


@dataclass(frozen=True, slots=True, eq=False)
class Features:
    """A layer's features.

    Attributes:
        width: Number of columns.
        blocks: The columns in ascending order, each in one block; those that are zero for all tokens may be missing.
    """

    width: int
    blocks: Sequence[FeatureBlock]


@contextmanager
def recording(module: nn.Module, read: Callable[[Tensor, Any], Recorded]) -> Iterator[list[Recorded]]:
    """Record what `read` returns for a module's first input [tokens, size] and its output."""
    records: list[Recorded] = []

    def keep(_module: nn.Module, args: tuple[Tensor, ...], output: object) -> None:
        records.append(read(args[0].reshape(-1, args[0].shape[-1]), output))

    handle = module.register_forward_hook(keep)
    try:
        yield records
    finally:
        handle.remove()


@dataclass(frozen=True, slots=True, eq=False)
class Network:
    """An expert or a network on the tokens that use it: `(factor * activate(inputs weight^T + bias)) down`.

    Attributes:
        tokens: Indices of the tokens, int64 [t], ascending.
        inputs: What the expert takes, [t, hidden].
        factor: Routing weights, float32 [t, 1], or masks of the neurons [t, neurons].
        weight: A view of the gate and up projections, [rows, hidden].
        bias: Their biases [rows], if there are any.
        down: A view of the output projection, [neurons, hidden].
        neurons: The neuron that each row belongs to, int64 [rows].
        activate: Activations [t, neurons] of `inputs weight^T + bias` [t, rows].
    """

    tokens: Tensor
    inputs: Tensor
    factor: Tensor
    weight: Tensor
    bias: Tensor | None
    down: Tensor
    neurons: Tensor
    activate: Callable[[Tensor], Tensor]

    def activated(self, part: Tensor) -> Tensor:
        """Return the activations of some of the tokens, float32 [part, neurons]."""
        return self.activate(self._rows(part))

    @torch.inference_mode(False)  # in which there are no derivatives, not even of an activation
    def slopes(self, part: Tensor) -> Tensor:
        """Derivatives of the neurons' activations by the rows that they have, float32 [part, rows]."""
        rows = self._rows(part).clone().requires_grad_()
        with torch.enable_grad():
            total = self.activate(rows).sum()
        return torch.autograd.grad(total, rows)[0]

    def _rows(self, part: Tensor) -> Tensor:
        dtype = products_dtype(self.inputs, min(self.down.shape))
        rows = nn.functional.linear(self.inputs[part].to(dtype), self.weight.to(dtype)).float()
        return rows if self.bias is None else rows + self.bias.float()


class LayerOutput(Protocol):
    """The linear map that ends a part of a decoder layer: it adds `features @ weights` to the residual stream."""

    @property
    def layer(self) -> int:
        """Index of the decoder layer."""

    @property
    def next_part(self) -> nn.Module | None:
        """The module that takes the residual stream after this part; None if the decoder layer ends with the part.

        Where the part's output is normalised before it is added, that norm.
        """

    def prepare(self, selects: bool) -> None:
        """Have weights in use that can be changed, unless `selects` says that neurons will be; call it first."""

    def recording(self) -> AbstractContextManager[list[Recorded]]:
        """Record passes through the layer within a `with` block, as the inputs of `features`.

        Every pass appends to the list. Padding tokens are recorded too.
        """

    def features(self, recorded: Recorded) -> Features: ...

    def add(self, columns: slice, change: Tensor) -> Tensor:
        """Add to the weights of some columns, float32 [columns, hidden], until the edit is applied again or reverted.

        Returns the change after rounding the weights to their dtype.
        """

    def weights(self, columns: slice) -> Tensor:
        """Return a view of the weights of some columns, [columns, hidden] in the model's dtype."""

    def use(self, columns: slice, weights: Tensor) -> None:
        """Use weights of an earlier fit for some columns."""


@runtime_checkable
class PartOutput(LayerOutput, Protocol):
    """The output of a part of a decoder layer that another part, or a norm of this output, follows."""

    def unedited(self) -> AbstractContextManager[None]:
        """Let this part compute what the unedited model's part does within a `with` block."""

    def gains(self, target: Tensor) -> Tensor | None:
        """Return how much an error counts in the stream, by token, for an output [tokens, hidden]; None for 1."""


@runtime_checkable
class NetworksOutput(LayerOutput, Protocol):
    """The output of experts or of a network whose other projections can be fitted, too."""

    def networks(self, recorded: Recorded) -> Iterator[Network]:
        """Return the experts in use, or the network, on recorded tokens.

        Changes of a weight in place count once the next one, or the end, is asked for.
        """

    def inputs(self) -> Sequence[Tensor]:
        """Return the gate and up projections in use."""

    def use_inputs(self, weights: Sequence[Tensor]) -> None:
        """Use gate and up projections of an earlier fit."""


@runtime_checkable
class NeuronSelectingOutput(LayerOutput, Protocol):
    """The output of experts whose neurons can be replaced by those of other experts of the layer."""

    def without_experts(self) -> AbstractContextManager[None]:
        """Let the layer's routed experts give zero, and compute nothing, within a `with` block."""

    def experts_output(self, recorded: Recorded, features: Features) -> Tensor:
        """What the routed experts in use add to the residual stream, float32 [tokens, hidden], by their features."""

    def select_neurons(self, recorded: Recorded, token_weights: Tensor | None) -> Tensor:
        """Choose neurons by importance for tokens recorded with the edit on the model, and use them from now on.

        `token_weights` are the tokens' weights in importance, float32 [tokens]; None for 1. Returns the neurons of each
        kept expert, int64 [n', neurons]; of I per expert, neuron j of expert e is `e * I + j`.
        """

    def use_neurons(self, neurons: Tensor) -> None:
        """Use neurons that were chosen earlier."""


class Repairable(Applicator):
    """An applicator whose edits can be repaired."""

    @abstractmethod
    def outputs(self) -> Sequence[LayerOutput]:
        """Return the linear maps to fit, in order of depth. Changing them changes no weights of the unedited model."""
