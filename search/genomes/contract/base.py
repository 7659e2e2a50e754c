"""The contract of genome kinds: what a folder here holds, and what `search.genomes.registry` has one line for.

A genome is arrays and nothing of torch; it is bred in the driver and *expresses* to an edit, which is all that a worker
sees. A kind is its settings (`GenomeSection`), the space of its genomes for a model (`GenomeSpace`), what candidates
cost before there are any (`GenomeCosts`, in `search.genomes.costs`), how they are drawn (`GenomeFigures`) and the
baselines that its searches can begin with (`Baseline`): `GenomeKind` holds them together. One suite
(tests/search/genomes/test_genome_contract.py) runs over all kinds.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Protocol, Self, TypeVar, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from moevolve.search.genomes.contract.costs import GenomeCosts
from moevolve.search.settings.phases import PhaseConfig
from moevolve.search.settings.section import Section
from moevolve.workers.contract.edits import Calibration, CalibrationRecipe, Edit
from moevolve.workers.contract.facts import ModelFacts

if TYPE_CHECKING:
    from moevolve.search.figures.style import Figure
    from moevolve.workers.profiling.outline import ModelOutline


class GenomeSection(Section):
    """The `genome` section of a configuration; a class per kind, whose field `kind` has the kind's name as its type.

    Attributes:
        random_title: what the kind's random individuals are, in a final table.
        parts: what a listing counts of an individual.
        counted: how many there are, for people; `experts` and `active` are as in `Description`.
    """

    random_title: ClassVar[str] = "random genomes"
    parts: ClassVar[str] = "experts"
    counted: ClassVar[str] = "{experts} per network, {active} active"
    kind: str


@dataclass(frozen=True, slots=True)
class Description:
    """A genome's cost and shape, for people and for the store.

    Attributes:
        experts: experts per layer: retained ones n' (eep), N of a split network, K blocks of a mixed linear layer.
        active: of these, per token.
        parameters: parameters of the model that the edit describes.
        active_parameters: of these, used per token.
        parameters_full: parameters of the unedited model.
        summary: one line for listings.
        penalty: what the search takes off the candidate's score; re-ranking and tests do not.
    """

    experts: int
    active: int
    parameters: int
    active_parameters: int
    parameters_full: int
    summary: str
    penalty: float = 0.0


class Genome(Protocol):
    """One candidate's searched parameters; immutable."""

    @property
    def space(self) -> GenomeSpace[Any]:
        """The space it belongs to."""
        ...

    def to_bytes(self) -> bytes:
        """Serialise; the space's `from_bytes` gives back an equal genome."""
        ...

    @property
    def content_hash(self) -> str:
        """SHA-256 (hex) of the canonical content: equal for genomes that express to the same edit."""
        ...

    def express(self) -> Edit:
        """The edit this genome stands for; made once, and kept: it is asked for again and again."""
        ...


G = TypeVar("G", bound=Genome)


@dataclass(frozen=True, slots=True)
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


def bred(genome: G, parents: Sequence[G]) -> Offspring[G]:
    """A child made of all of these parents, one or two, and mutated."""
    operator = "crossover+mutation" if len(parents) == 2 else "mutation"
    return Offspring(genome, operator, tuple(range(len(parents))))


class GenomeSpace(Protocol[G]):
    """All genomes of one kind for one model: what a strategy needs to sample and breed them.

    A kind that starts from measured activations has a `recipe`. Its space comes without them at first, good for
    checking a configuration, for `from_bytes` and for `describe`; `calibrated` gives the space that can do everything.
    """

    @property
    def kind(self) -> str:
        """Name of the genome kind."""
        ...

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
        """A child of one or two parents, all of them: crossover (if two), then mutation at the phase's rates."""
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


@runtime_checkable
class Choosing(Protocol):
    """A space whose genomes are, in some phases, a choice among parts; a space may be one, none has to."""

    def chooses(self, phase: PhaseConfig) -> bool:
        """Whether genomes of the phase are a choice among parts.

        Then `flatten` says which parts a genome has, 1 for those and 0 for the others, and `unflatten(scores)` is the
        genome whose parts' scores have the largest sum: no genome g has a larger `scores @ flatten(g)`.
        """
        ...


@dataclass(frozen=True, slots=True)
class Baseline:
    """A one-shot method: an individual that a phase can begin with, and that searches are compared with.

    Attributes:
        make: its individual, in a calibrated space.
        phases: kinds of phases that it can begin.
    """

    make: Callable[[Any], Offspring[Any]]
    phases: tuple[str, ...]

    def fault(self, space: Any) -> str | None:
        """Why it can't be had in a space, as a sentence that its name begins; None if it can."""
        return None


class GenomeFigures(ABC, Generic[G]):
    """How a kind's genomes are drawn. Matplotlib is imported when something is, not before.

    Attributes:
        subject: what is drawn of an individual: `matrices`.
        weights: what the routing weights of its experts are, for the heading of an analysis; None leaves them out.
    """

    subject: ClassVar[str]
    weights: ClassVar[str | None] = None

    def draws(self, genome: G, start: G | None) -> bool:
        """Whether there is something to draw.

        Args:
            genome: whose parameters.
            start: the genome that its search started from, if its kind has a start.
        """
        return True

    @abstractmethod
    def page(self, genome: G, start: G | None) -> tuple[Figure, str]:
        """A figure for a narrow page, and what is to be seen on it, in whole sentences; only for what `draws`."""

    @abstractmethod
    def draw(self, figure: Any, genome: G, start: G | None, label: str) -> None:
        """Draw on a wide part of a figure; only what `draws`.

        Args:
            figure: a figure or a part of one.
            genome: whose parameters.
            start: the genome that its search started from, if its kind has a start.
            label: how to name the individual.
        """

    def width(self, genome: G) -> float:
        """Inches that `draw` needs; 0 takes what there is."""
        return 0.0

    def matrices(self, genome: G) -> dict[str, NDArray[np.float32]]:
        """What was searched, as matrices [rows, columns] by their titles, for tables beside a drawing; if anything."""
        return {}

    def experts(self, genome: G) -> dict[str, frozenset[int]]:
        """The original experts that have a part in it, by the layers of a group; nothing where there are none such."""
        return {}


@dataclass(frozen=True, slots=True)
class GenomeKind:
    """One kind of genomes, whole.

    Attributes:
        section: its settings.
        make_space: makes the space of a section for a model; the last argument has the phases of the search, which may
            begin with baselines that something must be measured for. A space with a recipe is yet to be calibrated.
            Raises UserError where the section asks for what the model can't give.
        costs: what candidates of a space cost, for a model's outline.
        figures: how its genomes are drawn.
        baselines: one-shot methods by name; all but `random` and `start`, which are any space's `sample` and `start`.
        repairable: whether its edits can be repaired (`moevolve.workers.methods.shared.outputs.Repairable`).
        recombinable: whether what its edits keep are experts that a repair can fill with neurons of others.
        one_shot: settings, by dotted path, that a baseline is run with where it is a method of its own instead of what
            a search begins with: as its paper has it, whatever form the search's genomes have.
    """

    section: type[GenomeSection]
    make_space: Callable[[Any, ModelFacts, Sequence[PhaseConfig]], GenomeSpace[Any]]
    costs: Callable[[Any, ModelOutline], GenomeCosts[Any]]
    figures: GenomeFigures[Any]
    baselines: Mapping[str, Baseline] = field(default_factory=dict)
    repairable: bool = False
    recombinable: bool = False
    one_shot: Mapping[str, Any] = field(default_factory=dict)
