"""A kind of genomes as the registry knows it: settings, spaces, costs, drawings, and one-shot methods."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Generic

from moevolve.search.genomes.contract.base import Child, G, GenomeSection, GenomeSpace
from moevolve.search.genomes.contract.costs import GenomeCosts
from moevolve.search.genomes.contract.outline import GenomeOutline
from moevolve.search.genomes.contract.phases import PhaseConfig
from moevolve.workers.contract.facts import ModelFacts

if TYPE_CHECKING:
    from moevolve.search.drawing import AnyFigure, Figure
    from moevolve.workers.profiling.outline import ModelOutline


@dataclass(frozen=True, slots=True)
class Baseline:
    """A one-shot method: an individual that a phase can begin with, and that searches are compared with.

    Attributes:
        make: Function from a calibrated space to the individual.
    """

    make: Callable[[Any], Child]

    def problem(self, space: Any) -> str | None:
        """Say why a space can't have this baseline, as the predicate of a sentence; None if it can."""
        return None


class GenomeFigures(Generic[G]):
    """Drawings of a kind's genomes; by default there are none. Implementations import matplotlib only inside functions.

    Attributes:
        subject: Plural noun for what is drawn, such as `matrices`; empty if nothing is, otherwise `height`, `draw` and
            `caption` are implemented.
    """

    subject: ClassVar[str] = ""

    def height(self, genome: G) -> float:
        """Return the height in inches that `draw` needs on a narrow page."""
        raise NotImplementedError

    def draw(self, figure: AnyFigure, genome: G) -> None:
        """Draw on a matplotlib figure or subfigure."""
        raise NotImplementedError

    def caption(self, genome: G) -> str:
        """Return what is drawn, in whole sentences."""
        raise NotImplementedError

    def page(self, genome: G) -> Figure:
        """Return a figure for a narrow page."""
        from moevolve.search.drawing import drawing

        with drawing(self.height(genome)) as figure:
            self.draw(figure, genome)
            return figure

    def outline(self, genome: G) -> GenomeOutline:
        """Return what the candidate keeps, layer by layer, and what holds for all of it."""
        return GenomeOutline(())


@dataclass(frozen=True, slots=True)
class GenomeKind:
    """One kind of genomes; `search.genomes.registry` has one line for each.

    Attributes:
        make_space: Function from settings, a model's facts and the search's phases to the space, which is not yet
            calibrated if it has a measurement. The phases may begin with baselines that need one. It raises
            `UserError` for settings that the model doesn't support.
        baselines: One-shot methods by name, without `random` and `start`, which are every space's `sample` and `start`.
        repairable: True if its edits can be repaired (`moevolve.workers.methods.shared.outputs.Repairable`).
        recombinable: True if a repair can fill the kept experts with neurons of other experts.
        baseline_settings: Settings by dotted path for a baseline that is compared as a method of its own, so that it
            runs as in its paper whatever form the search's genomes have.
    """

    section: type[GenomeSection]
    make_space: Callable[[Any, ModelFacts, Sequence[PhaseConfig]], GenomeSpace[Any]]
    costs: Callable[[Any, ModelOutline], GenomeCosts[Any]] = GenomeCosts
    figures: GenomeFigures[Any] = field(default_factory=GenomeFigures)
    baselines: Mapping[str, Baseline] = field(default_factory=dict)
    repairable: bool = False
    recombinable: bool = False
    baseline_settings: Mapping[str, object] = field(default_factory=dict)
