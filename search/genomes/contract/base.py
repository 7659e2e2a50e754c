"""The contract of a genome kind.

A genome is a set of NumPy arrays. It is bred in the driver and *expresses* to an edit, which is all that a worker sees.
A `GenomeKind` consists of

- `GenomeSection`: its settings,
- `GenomeSpace`: all its genomes for one model, with sampling and breeding,
- `GenomeCosts` (`search.genomes.contract.costs`): the cost of candidates that don't exist yet,
- `GenomeFigures`: drawings of its genomes,
- `Baseline`: one-shot methods that a search can begin with and is compared with.

tests/search/genomes/test_genome_contract.py runs over all kinds.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Protocol, Self, TypeVar, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from moevolve.search.genomes.contract.costs import GenomeCosts
from moevolve.search.genomes.contract.outline import GenomeOutline
from moevolve.search.genomes.contract.phases import PhaseConfig, Section
from moevolve.workers.contract.edits import Calibration, CalibrationRecipe, Edit
from moevolve.workers.contract.facts import ModelFacts

if TYPE_CHECKING:
    from moevolve.search.drawing import Figure
    from moevolve.workers.profiling.outline import ModelOutline

MOST_PARTS = 65_536
"""Largest number of experts, groups of layers, or dimensions in a setting."""
MOST_STEPS = 10_000_000
"""Largest number of subsets to try or of steps to make in a setting."""
MOST_TOKENS = 1_000_000_000
"""Largest number of tokens in a setting."""


class GenomeSection(Section):
    """The `genome` section of a configuration.

    Every kind has a subclass, whose field `kind` has the kind's name as its literal type.

    Attributes:
        random_title: Title of the random individuals in a final table.
        parts: Plural noun for the parts of an individual that listings count.
        count_format: Format of these counts for people, with the fields `experts` and `active` of `Description`.
    """

    random_title: ClassVar[str] = "random genomes"
    parts: ClassVar[str] = "experts"
    count_format: ClassVar[str] = "{experts} per network, {active} active"
    kind: str


@dataclass(frozen=True, slots=True)
class Description:
    """A genome's size and cost, for people and for the store.

    Attributes:
        experts: Experts per layer: retained experts n', experts N of a split network, or blocks K of a mixed
            linear layer.
        active: Experts per token.
        parameters: Parameters of the edited model, of which a token uses `active_parameters`.
        parameters_full: Parameters of the unedited model.
        summary: Description in one line for listings.
        penalty: Amount subtracted from the candidate's score on `search`; `dev` and `test` scores have no penalty.
    """

    experts: int
    active: int
    parameters: int
    active_parameters: int
    parameters_full: int
    summary: str
    penalty: float = 0.0


class Genome(Protocol):
    """The searched parameters of one candidate; immutable."""

    @property
    def space(self) -> GenomeSpace[Any]: ...

    def to_bytes(self) -> bytes:
        """Serialise the genome; the space's `from_bytes` is the inverse."""
        ...

    @property
    def content_hash(self) -> str:
        """SHA-256 (hex) of the canonical content: equal for genomes that express to the same edit."""
        ...

    def express(self) -> Edit:
        """Return the edit that the genome stands for; implementations cache it, since it is needed many times."""
        ...


class ArrayGenome(ABC):
    """Base of genomes that are frozen dataclasses of arrays: equal bytes mean equal genomes.

    Subclasses are made with `eq=False`, since dataclasses can't compare arrays.
    """

    @abstractmethod
    def to_bytes(self) -> bytes: ...

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ArrayGenome) and type(other) is type(self) and self.to_bytes() == other.to_bytes()

    def __hash__(self) -> int:
        return hash(self.to_bytes())

    def _set_array(self, name: str, array: NDArray[Any], shape: tuple[int, ...]) -> None:
        """Set an attribute to a read-only array of the given shape."""
        if array.shape != shape:
            raise ValueError(f"{name} has shape {array.shape}, the space has {shape}")
        array.flags.writeable = False
        object.__setattr__(self, name, array)


G = TypeVar("G", bound=Genome)


@dataclass(frozen=True, slots=True)
class Offspring(Generic[G]):
    """A new genome and its origin.

    Attributes:
        operator: Name of the operator that made it.
        parents: Positions of its parents among the genomes given to a space, or indices of its parents in the search
            once a strategy has chosen them.
        note: Remark on its making for its summary.
    """

    genome: G
    operator: str
    parents: tuple[int, ...]
    note: str = ""


def offspring_of(genome: G, parents: Sequence[G]) -> Offspring[G]:
    """Return a mutated child of one parent, or of two by crossover, with its operator's name."""
    operator = "crossover+mutation" if len(parents) == 2 else "mutation"
    return Offspring(genome, operator, tuple(range(len(parents))))


class GenomeSpace(Protocol[G]):
    """All genomes of one kind for one model, with the operators that a strategy needs.

    A kind whose genomes depend on measured activations has a `recipe`. Its space is first made without them, which is
    enough for checking a configuration, `from_bytes` and `describe`; `calibrated` returns the complete space.
    """

    @property
    def kind(self) -> str: ...

    @property
    def phase_kinds(self) -> tuple[str, ...]:
        """Kinds of phases that the space can breed in."""
        ...

    @property
    def recipe(self) -> CalibrationRecipe | None:
        """The calibration that the space needs; None if it needs none."""
        ...

    def calibrated(self, calibration: Calibration) -> Self: ...

    def start(self, phase: PhaseConfig) -> Offspring[G] | None:
        """Return the method's own unsearched genome, the first individual of a search; None if there is none."""
        ...

    def sample(self, rng: np.random.Generator, phase: PhaseConfig) -> Offspring[G]:
        """Draw a random initial genome for a phase."""
        ...

    def breed(self, rng: np.random.Generator, phase: PhaseConfig, parents: tuple[G, ...]) -> Offspring[G]:
        """Return a child of one or two parents: crossover if there are two, then mutation at the phase's rates."""
        ...

    def from_bytes(self, data: bytes) -> G:
        """Invert `Genome.to_bytes`.

        Raises:
            ValueError: The bytes are not a genome of this space.
        """
        ...

    def flatten(self, genome: G, phase: PhaseConfig) -> NDArray[np.float64]:
        """Return the genome as a point for black-box optimisers of a phase: float64 [dimension]."""
        ...

    def unflatten(self, vector: NDArray[np.float64], phase: PhaseConfig) -> G:
        """Return the genome at a point; `unflatten(flatten(g)) == g` for genomes of the phase."""
        ...

    def describe(self, genome: G) -> Description: ...


@runtime_checkable
class SubsetSpace(Protocol):
    """A `GenomeSpace` whose genomes are, in some phases, subsets of a fixed set of parts; optional for a kind."""

    def selects_subset(self, phase: PhaseConfig) -> bool:
        """Say whether genomes of a phase are subsets of parts.

        If so, `flatten(g)` is the indicator vector of the subset (1 for its parts, 0 for others), and
        `unflatten(scores)` is the subset with the largest sum of scores: no genome g has a larger
        `scores @ flatten(g)`.
        """
        ...

    def importance(self, phase: PhaseConfig) -> NDArray[np.float64]:
        """Return what the calibration says of the parts, a row per statistic: float64 [statistics, parts].

        Higher values are for parts that are more likely worth keeping; there may be no rows.
        """
        ...


@dataclass(frozen=True, slots=True)
class Baseline:
    """A one-shot method: an individual that a phase can begin with, and that searches are compared with.

    Attributes:
        make: Function from a calibrated space to the individual.
        phases: Kinds of phases that it can begin.
    """

    make: Callable[[Any], Offspring[Any]]
    phases: tuple[str, ...]

    def problem(self, space: Any) -> str | None:
        """Say why a space can't have this baseline, as the predicate of a sentence; None if it can."""
        return None


class GenomeFigures(ABC, Generic[G]):
    """Drawings of a kind's genomes. Implementations import matplotlib only inside functions.

    `start` is always the genome that the search started from, or None if its kind has no start.

    Attributes:
        subject: Plural noun for what is drawn, such as `matrices`.
        weights: Name of the experts' routing weights in the heading of an analysis; None leaves them out.
    """

    subject: ClassVar[str]
    weights: ClassVar[str | None] = None

    def has_figure(self, genome: G, start: G | None) -> bool:
        """Say whether there is something to draw; the other methods require it."""
        return True

    @abstractmethod
    def page(self, genome: G, start: G | None) -> tuple[Figure, str]:
        """Return a figure for a narrow page, and its caption in whole sentences."""

    @abstractmethod
    def draw(self, figure: Any, genome: G, start: G | None, label: str) -> None:
        """Draw on `figure`, a wide matplotlib figure or subfigure; `label` names the individual in the title."""

    def width(self, genome: G) -> float:
        """Return the width in inches that `draw` needs; 0 accepts any."""
        return 0.0

    def matrices(self, genome: G) -> dict[str, NDArray[np.float32]]:
        """Return the searched matrices [rows, columns] by title, for tables beside a drawing; may be empty."""
        return {}

    def outline(self, genome: G) -> GenomeOutline:
        """Return what the candidate keeps, layer by layer, and what holds for all of it."""
        return GenomeOutline(())


@dataclass(frozen=True, slots=True)
class GenomeKind:
    """One kind of genomes; `search.genomes.registry` has one line for each.

    Attributes:
        make_space: Function from settings, a model's facts and the search's phases to the space, which is not yet
            calibrated if it has a recipe. The phases may begin with baselines that need measurements. It raises
            `UserError` for settings that the model doesn't support.
        baselines: One-shot methods by name, without `random` and `start`, which are every space's `sample` and `start`.
        repairable: True if its edits can be repaired (`moevolve.workers.methods.shared.outputs.Repairable`).
        recombinable: True if a repair can fill the kept experts with neurons of other experts.
        baseline_settings: Settings by dotted path for a baseline that is compared as a method of its own, so that it
            runs as in its paper whatever form the search's genomes have.
    """

    section: type[GenomeSection]
    make_space: Callable[[Any, ModelFacts, Sequence[PhaseConfig]], GenomeSpace[Any]]
    costs: Callable[[Any, ModelOutline], GenomeCosts[Any]]
    figures: GenomeFigures[Any]
    baselines: Mapping[str, Baseline] = field(default_factory=dict)
    repairable: bool = False
    recombinable: bool = False
    baseline_settings: Mapping[str, Any] = field(default_factory=dict)
