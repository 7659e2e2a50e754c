"""The contract of genome kinds. One property-based suite (tests/search/test_genome_contract.py) runs over all of them.

A genome is arrays and nothing of torch; it is bred in the driver and *expresses* to an edit, which is all that a worker
sees.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Generic, Protocol, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from moevolve.search.config.phases import PhaseConfig
from moevolve.workers.methods.base import Calibration, CalibrationRecipe, Edit


@dataclass(frozen=True, slots=True)
class Description:
    """A genome's cost and shape, for people and for the store.

    Attributes:
        experts: experts per layer: retained ones n' (eep), N of a split network, K blocks of a mixed linear layer.
        active: of these, per token.
        parameters: parameters of the model that the edit describes.
        active_parameters: of these, used per token.
        flops: floating-point operations per token in linear layers, a multiply and an add counting two.
        parameters_full: parameters of the unedited model.
        summary: one line for listings.
        penalty: what the search takes off the candidate's score; re-ranking and tests do not.
    """

    experts: int
    active: int
    parameters: int
    active_parameters: int
    flops: int
    parameters_full: int
    summary: str
    penalty: float = 0.0


class Genome(Protocol):
    """One candidate's searched parameters; immutable."""

    def to_bytes(self) -> bytes:
        """Serialise; the space's `from_bytes` gives back an equal genome."""
        ...

    @property
    def content_hash(self) -> str:
        """SHA-256 (hex) of the canonical content: equal for genomes that express to the same edit."""
        ...

    def express(self) -> Edit:
        """The edit this genome stands for."""
        ...


G = TypeVar("G", bound=Genome)


@dataclass(frozen=True)
class Offspring(Generic[G]):
    """A new genome and how it came about.

    Attributes:
        genome: what was made.
        operator: name of what made it.
        parents: what it was made from, by number among those that its maker was shown: the genomes given to a space, or
            the individuals of the search that a strategy chose from.
        note: how it was made, for its summary; mostly empty.
    """

    genome: G
    operator: str
    parents: tuple[int, ...]
    note: str = ""

    @cached_property
    def edit(self) -> Edit:
        """What the genome expresses to, made once."""
        return self.genome.express()


class GenomeSpace(Protocol[G]):
    """All genomes of one kind for one model: what a strategy needs to sample and breed them.

    A kind that starts from measured activations has a `recipe`. Its space comes without them at first, good for
    checking a configuration, for `from_bytes` and for `describe`; `calibrated` gives the space that can do everything.
    """

    @property
    def phase_kinds(self) -> tuple[str, ...]:
        """Kinds of phases this space knows how to breed in."""
        ...

    @property
    def recipe(self) -> CalibrationRecipe | None:
        """How the calibration is made that this kind needs; None if it needs none."""
        ...

    def calibrated(self, calibration: Calibration) -> Self:
        """The same space with its calibration."""
        ...

    def start(self, phase: PhaseConfig) -> Offspring[G] | None:
        """The method's own unsearched start, which is a search's first individual; None if it starts at random."""
        ...

    def sample(self, rng: np.random.Generator, phase: PhaseConfig) -> Offspring[G]:
        """An initial genome of `phase`."""
        ...

    def breed(self, rng: np.random.Generator, phase: PhaseConfig, parents: tuple[G, ...]) -> Offspring[G]:
        """A child of one or two parents: crossover (if two), then mutation, at the phase's rates."""
        ...

    def from_bytes(self, data: bytes) -> G:
        """Inverse of `Genome.to_bytes`.

        Raises:
            ValueError: the bytes are no genome of this space.
        """
        ...

    def flatten(self, genome: G, phase: PhaseConfig) -> NDArray[np.float64]:
        """The genome as a point for black-box optimisers of `phase`: float64 [dimension]."""
        ...

    def unflatten(self, vector: NDArray[np.float64], phase: PhaseConfig) -> G:
        """The genome at a point; `unflatten(flatten(g)) == g` for genomes of the phase."""
        ...

    def describe(self, genome: G) -> Description:
        """What the genome costs."""
        ...
