"""What the unedited model and a kind's candidates take, worked out before there are any: operations, sizes, traffic.

Operations per token are counted here and in the kinds' own `cost.py`, and nowhere else in a search; a multiply and an
add count two.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from moevolve.workers.facts import DenseFacts
    from moevolve.workers.profiling.outline import LayerOutline, ModelOutline
    from moevolve.workers.profiling.passes import Pass

S = TypeVar("S")


@dataclass(frozen=True, slots=True)
class LayerWork:
    """Operations of one decoder layer of a candidate per position, attention between positions left out.

    Attributes:
        outside: on every position of a batch, padding too.
        block: on positions that hold a token, and in the last layer on those that are read.
    """

    outside: int
    block: int

    @classmethod
    def of(cls, layer: LayerOutline, active: int) -> LayerWork:
        """A layer's work where a token runs `active` experts."""
        return cls(layer.outside, layer.block + layer.router + active * layer.expert)

    def with_network(self, change: int) -> LayerWork:
        """With operations added in its feed-forward network, which is outside where there is no block (OPT)."""
        if self.block:
            return replace(self, block=self.block + change)
        return replace(self, outside=self.outside + change)


@dataclass(frozen=True, slots=True)
class ModelWork:
    """What a position takes in a model that is or isn't edited.

    Attributes:
        layers: in order of depth.
        output: operations for a position's logits.
        pair: operations per attended pair of positions, in all layers.
        weight_bytes: read by every pass, experts left out.
        expert_bytes: of one expert in every MoE layer.
        retained, active: experts per MoE layer and per token; 0 without any.
        cache_bytes: keys and values of a position.
    """

    layers: tuple[LayerWork, ...]
    output: int
    pair: int
    weight_bytes: int
    expert_bytes: int
    retained: int
    active: int
    cache_bytes: int

    @property
    def token_flops(self) -> int:
        """Operations per token in matrix products, its logits included."""
        return sum(layer.outside + layer.block for layer in self.layers) + self.output

    def flops(self, one: Pass) -> int:
        """Operations of a pass, in all its steps."""
        last = self.layers[-1]
        outside = sum(layer.outside for layer in self.layers) * one.tokens
        block = sum(layer.block for layer in self.layers[:-1]) * one.real + last.block * one.read
        return one.steps * (outside + block + self.output * one.logits) + self.pair * one.pairs

    def traffic(self, one: Pass) -> float:
        """Bytes of weights and of cached keys and values that a pass reads, in all its steps.

        Of n' experts, tokens that choose k each at random touch n' (1 - (1 - k/n')^tokens).
        """
        touched = 0.0
        if self.retained:
            touched = self.retained * (1 - (1 - self.active / self.retained) ** one.real)
        weights = self.weight_bytes + touched * self.expert_bytes
        cached = self.cache_bytes * (one.cached + one.tokens * (one.steps - 1) / 2)
        return one.steps * (weights + cached)


def full_work(outline: ModelOutline) -> ModelWork:
    """The unedited model's work."""
    facts = outline.facts
    return ModelWork(
        tuple(LayerWork.of(layer, facts.active) for layer in outline.layers),
        outline.output_flops,
        outline.attention_flops,
        outline.weight_bytes - outline.experts_bytes,
        outline.experts_bytes // facts.experts if facts.experts else 0,
        facts.experts,
        facts.active,
        outline.cache_bytes,
    )


def network_flops(dense: DenseFacts) -> int:
    """Operations per position of one dense feed-forward network."""
    return 2 * (3 if dense.gated else 2) * dense.hidden * dense.width


def activation_flops(dense: DenseFacts) -> int:
    """Of these, all but the output projection's."""
    return network_flops(dense) - 2 * dense.hidden * dense.width


def down_bytes(outline: ModelOutline, dense: DenseFacts) -> int:
    """The output projections of all dense networks."""
    return dense.layers * dense.width * dense.hidden * outline.facts.dtype_bytes


@dataclass(frozen=True, slots=True)
class EditTraffic:
    """What making a candidate of the resident model moves.

    Attributes:
        read: bytes of originals.
        written: bytes of the candidate's buffers.
        copied: whether they are filled with what is read as it is, so that bringing it over is all there is to do.
    """

    read: int
    written: int
    copied: bool


@dataclass(frozen=True, slots=True)
class FitOutline:
    """A linear map of a candidate's decoder layer that a repair fits.

    Attributes:
        width: features.
        blocks: of features that are zero on the same tokens.
        density: share of the tokens on which a feature isn't zero.
        flops: operations of a token's features.
        neurons: operations per token of choosing which neurons are to be fitted; 0 where they can't be others.
        pool: neurons that they are chosen among.
    """

    width: int
    blocks: int
    density: float
    flops: int
    neurons: int = 0
    pool: int = 0


class GenomeCosts(ABC, Generic[S]):
    """What the candidates of one space take; `phase` is a kind of phase.

    Args:
        space: the space.
        outline: its model.
    """

    def __init__(self, space: S, outline: ModelOutline) -> None:
        self.space, self.outline = space, outline

    @abstractmethod
    def work(self, phase: str) -> ModelWork:
        """What a position takes in a candidate."""

    @abstractmethod
    def counts(self, phase: str) -> tuple[int, int, int | None, int]:
        """A candidate's experts, active ones, parameters and active parameters, as `Description` has them.

        None stands for parameters that differ between candidates; active ones are then those of the start's widths, and
        the start may have fewer.
        """

    def different(self, phase: str) -> int | None:
        """How many different candidates a phase can make; None if they don't run out."""
        return None

    def buffer_bytes(self, phases: Iterable[str], host: bool, repaired: bool) -> int:
        """What a worker sets aside for candidates' own weights.

        Args:
            phases: of the search.
            host: whether original experts stay on the host.
            repaired: whether candidates are.
        """
        return 0

    def edit_traffic(self, phase: str, host: bool, repaired: bool) -> EditTraffic | None:
        """What making a candidate moves, before it is fitted; None where nobody knows beforehand.

        Args:
            phase: of the candidate.
            host: whether original experts stay on the host.
            repaired: whether the candidate is.
        """
        return None

    def fits(self) -> tuple[tuple[FitOutline, ...], ...]:
        """What a repair fits of every decoder layer, in the order in which it does."""
        return ((),) * len(self.outline.layers)
