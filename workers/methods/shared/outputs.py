"""What a repair fits: the linear maps that end parts of decoder layers, as they are while an edit is on the model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor, nn

from moevolve.workers.contract.fitting import NeuronRecipe
from moevolve.workers.contract.methods import Applicator


@dataclass(frozen=True, slots=True, eq=False)
class FeatureBlock:
    """Some columns of the features, on the tokens where they aren't zero.

    Attributes:
        columns: which ones.
        tokens: where, int64 [t], each once.
        values: float32 [t, columns].
    """

    columns: slice
    tokens: Tensor
    values: Tensor


class Features(Protocol):
    """A layer's features, made block by block as often as they are asked for."""

    @property
    def width(self) -> int:
        """Columns in all."""
        ...

    def blocks(self, memory: int) -> Iterator[FeatureBlock]:
        """All columns, each in one block but those that are zero everywhere, which may be in none.

        Args:
            memory: bytes that a block may take while it is made and used.
        """
        ...


@dataclass(frozen=True, slots=True, eq=False)
class NeuronSelection:
    """What slots of a layer are filled with.

    Attributes:
        neurons: int64 [n', I], neuron j of expert e as `e * I + j`.
        rows: of the router, fitted to what the slots stand for: weight [n', hidden], and bias [n'] where it has one;
            None where they are the edit's own.
        skip_below: with rows of an edit that skips experts, the threshold that goes with them.
    """

    neurons: Tensor
    rows: tuple[Tensor, Tensor | None] | None
    skip_below: float | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors."""
        return sum(each.nbytes for each in (self.neurons, *(self.rows or ())) if each is not None)


class LayerOutput(Protocol):
    """The linear map that ends a part of a decoder layer: `features @ weights` is added to the residual stream."""

    @property
    def layer(self) -> int:
        """Index of the decoder layer."""
        ...

    @property
    def next_part(self) -> nn.Module | None:
        """The module of the layer that takes the residual stream behind this part; None if the layer ends with it."""
        ...

    def watching(self) -> AbstractContextManager[list[tuple[Tensor, ...]]]:
        """For the length of a `with` block, what features are made of: a list to which every pass of the layer adds.

        Tensors are [columns of all rows, ...], padding too.
        """
        ...

    def features(self, seen: tuple[Tensor, ...]) -> Features:
        """The features of tokens, of which was seen what each tensor has [tokens, ...]."""
        ...

    def add(self, columns: slice, change: Tensor) -> Tensor:
        """Change the weights of some columns, until the edit is next made or reverted.

        Args:
            columns: of the features.
            change: float32 [columns, hidden].

        Returns:
            What was added once it was rounded to the weights' dtype, float32 [columns, hidden].
        """
        ...

    def unedited(self) -> AbstractContextManager[None]:
        """For the length of a `with` block, let this part compute what the unedited model's does."""
        ...


@runtime_checkable
class Recombinable(LayerOutput, Protocol):
    """An output whose neurons can be exchanged for others of the layer's."""

    def recombine(self, seen: tuple[Tensor, ...], recipe: NeuronRecipe, memory: int) -> NeuronSelection:
        """Choose neurons and put them in place; what is fitted afterwards are theirs.

        Args:
            seen: what was watched of the layer as the edit has it, each [tokens, ...].
            recipe: how they are chosen.
            memory: bytes that may be taken.

        Returns:
            What was put in place, for `fill`.
        """
        ...

    def eliminate(
        self,
        seen: tuple[Tensor, ...],
        filling: NeuronSelection,
        missing: Tensor,
        fitted: Tensor,
        ridge_lambda: float,
        recipe: NeuronRecipe,
        memory: int,
    ) -> NeuronSelection:
        """Choose neurons by what a fit of them leaves undone; nothing is put in place.

        Args:
            seen: what was watched of the layer as it is filled now, each [tokens, ...].
            filling: that is in place, fitted.
            missing: what it leaves undone, float32 [tokens, hidden].
            fitted: which tokens are looked at, bool [tokens].
            ridge_lambda: of the ridge that fits them.
            recipe: how they are chosen.
            memory: bytes that may be taken.

        Returns:
            The same with other neurons, for `fill`.
        """
        ...

    def fill(self, filling: NeuronSelection) -> None:
        """Put in place what was chosen before."""
        ...


@runtime_checkable
class Repairable(Applicator, Protocol):
    """An applicator whose edits can be repaired."""

    def outputs(self) -> Sequence[LayerOutput]:
        """The maps to fit, in order of depth, with the edit on the model; what they change is the edit's own."""
        ...
