"""The contract of a genome kind: its settings, its genomes, and all genomes for one model.

A genome is bred in the driver and *expresses* to an edit, which is all that a worker sees. A kind implements `sample`,
`breed` and `describe` of `GenomeSpace` and `express` of `Genome`; everything else has a default. Genomes that consist
of arrays are `ArrayGenome`s (`search.genomes.contract.arrays`), and a kind is registered as a `GenomeKind`
(`search.genomes.contract.kind`). tests/search/genomes/test_genome_contract.py runs over all kinds.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from moevolve.search.genomes.contract.phases import PhaseConfig, Section
from moevolve.workers.contract.edits import Calibration, Edit, Measurement

# Largest number of experts, groups of layers, or dimensions in a setting.
MOST_PARTS = 65_536
# Largest number of subsets to try or of steps to make in a setting.
MOST_STEPS = 10_000_000
# Largest number of tokens in a setting.
MOST_TOKENS = 1_000_000_000


class GenomeSection(Section):
    """The `genome` section of a configuration.

    Every kind has a subclass, whose field `kind` has the kind's name as its literal type.

    Attributes:
        random_title: Title of the random individuals in a final table.
        parts: Plural noun for the parts of an individual that listings count.
        count_format: Format of these counts for people, with the fields `experts` and `active` of `Description`.
        phase_kinds: Kinds of phases that genomes are bred in; one-shot methods begin the first of them.
    """

    random_title: ClassVar[str] = "random genomes"
    parts: ClassVar[str] = "experts"
    count_format: ClassVar[str] = "{experts} per network, {active} active"
    phase_kinds: ClassVar[tuple[str, ...]] = ("tune",)
    kind: str

    def check_experts(self, family: str, experts: int) -> None:
        """Raise UserError if a model of a family with so many experts per layer, 0 if it is dense, can't be searched.

        It is called with what config.json says, and again when the model is known.
        """


@dataclass(frozen=True, slots=True)
class Description:
    """A genome's size and cost, for people and for the store.

    Attributes:
        experts: Experts per layer: retained experts n', experts N of a split network, or blocks K of a mixed
            linear layer.
        active: Experts per token.
        parameters: Parameters of the edited model; a token uses `active_parameters` of them.
        parameters_full: Parameters of the unedited model; a token uses `active_parameters_full` of them.
        summary: Description in one line for listings.
        stock: True if a checkpoint of it needs no code of its own; False also where a kind's candidates don't differ in
            that.
        penalty: Amount subtracted from the candidate's score on `search`; `dev` and `test` scores have no penalty.
    """

    experts: int
    active: int
    parameters: int
    active_parameters: int
    parameters_full: int
    active_parameters_full: int
    summary: str
    penalty: float = 0.0
    stock: bool = False


class Genome(ABC):
    """The searched parameters of one candidate; immutable."""

    space: GenomeSpace[Any]

    @abstractmethod
    def to_bytes(self) -> bytes:
        """Serialise the genome; the space's `from_bytes` is the inverse."""

    @abstractmethod
    def express(self) -> Edit:
        """Return the edit that the genome stands for; implementations cache it, since it is needed many times."""

    @property
    def content_hash(self) -> str:
        """SHA-256 (hex) of the bytes. Different genomes can express to the same edit, which has a hash of its own."""
        return hashlib.sha256(self.to_bytes()).hexdigest()


G = TypeVar("G", bound=Genome)
G_co = TypeVar("G_co", bound=Genome, covariant=True)


@dataclass(frozen=True, slots=True)
class Offspring(Generic[G_co]):
    """A new genome and its origin.

    Attributes:
        operator: Name of the operator that made it.
        parents: Positions of its parents among the genomes given to a space, or indices of its parents in the search
            once a strategy has chosen them.
        note: Remark on its making for its summary.
    """

    genome: G_co
    operator: str
    parents: tuple[int, ...]
    note: str = ""


Child = Offspring[Genome]  # of any kind


def offspring_of(genome: G, parents: Sequence[G]) -> Offspring[G]:
    """Return a mutated child of one parent, or of two by crossover, with its operator's name."""
    operator = "crossover+mutation" if len(parents) == 2 else "mutation"
    return Offspring(genome, operator, tuple(range(len(parents))))


class GenomeSpace(ABC, Generic[G]):
    """All genomes of one kind for one model, with the operators that a strategy needs.

    A kind whose genomes depend on measured activations has a `measurement`. Its space is first made without them, which
    is enough for checking a configuration, `from_bytes` and `describe`; `calibrated` returns the complete space.
    """

    @property
    @abstractmethod
    def kind(self) -> str:
        """Name of the kind in the registry."""

    @property
    def measurement(self) -> Measurement | None:
        """The calibration that the space needs; None if it needs none."""
        return None

    def calibrated(self, calibration: Calibration) -> Self:
        """Return the space with the results of its measurement."""
        return self

    def start(self, phase: PhaseConfig) -> Offspring[G] | None:
        """Return the method's own unsearched genome, the first individual of a search; None without one."""
        return None

    @abstractmethod
    def sample(self, rng: np.random.Generator, phase: PhaseConfig) -> Offspring[G]:
        """Draw a random initial genome for a phase."""

    @abstractmethod
    def breed(self, rng: np.random.Generator, phase: PhaseConfig, parents: tuple[G, ...]) -> Offspring[G]:
        """Return a child of one or two parents: crossover if there are two, then mutation at the phase's rates."""

    @abstractmethod
    def from_bytes(self, data: bytes) -> G:
        """Invert `Genome.to_bytes`.

        Raises:
            ValueError: The bytes are not a genome of this space.
        """

    @abstractmethod
    def describe(self, genome: G) -> Description:
        """Return the size and cost of a candidate."""

    @abstractmethod
    def flatten(self, genome: G, phase: PhaseConfig) -> NDArray[np.float64]:
        """Return the genome as a point for black-box optimisers of a phase: float64 [coordinates], maybe [0]."""

    @abstractmethod
    def unflatten(self, vector: NDArray[np.float64], phase: PhaseConfig) -> G:
        """Return the genome at a point; for genomes of the phase it inverts `flatten`."""

    def selects_subset(self, phase: PhaseConfig) -> bool:
        """Say whether genomes of a phase are subsets of parts, whose values the strategy `surrogate` can learn.

        If so, `flatten(g)` is the indicator vector of the subset (1 for its parts, 0 for others), and
        `unflatten(scores)` is the subset with the largest sum of scores: no genome g has a larger
        `scores @ flatten(g)`.
        """
        return False

    def importance(self, phase: PhaseConfig) -> NDArray[np.float64]:
        """Return what the calibration says of the parts, a row per statistic: float64 [statistics, parts].

        Higher values are for parts that are more likely worth keeping. Phases that select no subset have no parts.
        """
        return np.zeros((0, 0))
