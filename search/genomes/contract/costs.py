"""The cost of a kind's candidates, known before there are any: sizes, memory, and what a repair fits."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from moevolve.search.genomes.contract.base import Genome, GenomeSpace
from moevolve.search.genomes.contract.operators import generator
from moevolve.search.genomes.contract.phases import PhaseConfig
from moevolve.workers.contract.facts import DenseFacts

if TYPE_CHECKING:
    from moevolve.workers.profiling.outline import ModelOutline

S_co = TypeVar("S_co", bound=GenomeSpace[Any], covariant=True)


def down_projection_bytes(outline: ModelOutline, dense: DenseFacts) -> int:
    """Return the size of the output projections of all dense networks."""
    return dense.layers * dense.width * dense.hidden * outline.facts.dtype_bytes


@dataclass(frozen=True, slots=True)
class FitOutline:
    """The size of a linear map that a repair fits in one decoder layer.

    Attributes:
        width: Number of input features.
        blocks: Number of blocks of features; the features of a block are zero on the same tokens.
        density: Share of the tokens on which a feature of a block isn't zero.
        dense: Number of features, of `width`, that are in no block, and zero on no token.
    """

    width: int
    blocks: int
    density: float
    dense: int = 0

    @property
    def block(self) -> int:
        """Number of features of a block."""
        return (self.width - self.dense) // self.blocks


class GenomeCosts(Generic[S_co]):
    """The costs of the candidates of one space, which needn't be calibrated."""

    def __init__(self, space: S_co, outline: ModelOutline) -> None:
        self.space, self.outline = space, outline

    def counts(self, phase: PhaseConfig) -> tuple[int, int, int | None, int]:
        """Return `experts`, `active`, `parameters` and `active_parameters` as in `Description`.

        They are a random candidate's by default. `parameters` is None if candidates differ in it; `active_parameters`
        are then those of the start's widths, and the start itself may have fewer.
        """
        found = self.space.describe(self.space.sample(generator(0, 0), phase).genome)
        return found.experts, found.active, found.parameters, found.active_parameters

    def buffer_bytes(self, phases: Iterable[str], host: bool, repaired: bool) -> int:
        """Return the bytes of a worker's buffers for the candidates' own weights.

        Args:
            phases: Kinds of the search's phases.
            host: True if original experts stay on the host.
            repaired: True if any candidates are repaired.
        """
        return 0

    def calibration_bytes(self, longest: int) -> int:
        """Return the peak device memory of the calibration besides the model; `longest` sequence in tokens."""
        return 0

    def calibration_host_bytes(self) -> int:
        """Return the peak host memory of the calibration, for the parts that don't run on the device."""
        return 0

    def fitted_maps(self) -> tuple[tuple[FitOutline, ...], ...]:
        """Return the linear maps that a repair fits in every decoder layer, in the order of fitting."""
        return ((),) * self.outline.layers


# Costs of the candidates of any kind.
SpaceCosts = GenomeCosts[GenomeSpace[Genome]]
