"""The contract of genome kinds. One property-based suite (tests/search/test_genome_contract.py) runs over all of them.

A genome is arrays and nothing of torch; it is bred in the driver and *expresses* to an edit, which is all that a worker
sees.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from moevolve.search.config import PhaseConfig
from moevolve.workers.edits.base import Edit


@dataclass(frozen=True, slots=True)
class Description:
    """A genome's cost and shape, for people and for the store.

    Attributes:
        experts: retained experts n' per MoE layer.
        active: experts per token k.
        parameters: parameters of the model that the edit describes.
        active_parameters: of these, used per token.
        parameters_full: parameters of the unedited model.
        summary: one line for listings.
    """

    experts: int
    active: int
    parameters: int
    active_parameters: int
    parameters_full: int
    summary: str


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


@dataclass(frozen=True, slots=True)
class Offspring(Generic[G]):
    """A new genome and how it came about.

    Attributes:
        genome: what was made.
        operator: name of what made it.
        parents_used: positions, among the parents given, of those it was made from.
    """

    genome: G
    operator: str
    parents_used: tuple[int, ...]


class GenomeSpace(Protocol[G]):
    """All genomes of one kind for one model: what a strategy needs to sample and breed them."""

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
