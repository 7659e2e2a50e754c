"""The genome kind `capacity`: its one-shot candidates, what candidates cost, and how they are drawn.

One-shot candidates keep the experts of the most energy. Where the number of kept experts is searched, `equal` keeps the
largest one, `middle` the one in the middle, and `fewest` the smallest one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from moevolve.evaluators.errors import UserError
from moevolve.search.drawing import SEQUENTIAL, drawing, scale_below, ticks
from moevolve.search.genomes.capacity.space import CapacityGenome, CapacitySection, CapacitySpace
from moevolve.search.genomes.contract.base import Offspring
from moevolve.search.genomes.contract.kind import Baseline, GenomeFigures, GenomeKind
from moevolve.search.genomes.contract.outline import GenomeOutline, LayerOutline
from moevolve.search.genomes.contract.phases import PhaseConfig
from moevolve.search.genomes.experts.costs import ExpertsCosts
from moevolve.workers.contract.facts import ModelFacts

if TYPE_CHECKING:
    from moevolve.search.drawing import Figure


ENERGY_EXPONENTS = (2.0, 2.0, 0.0)
"""With these, importance is energy: the sum over an expert's tokens of squares of routing weight times output norm."""


def equal(space: CapacitySpace) -> CapacityGenome:
    """As many active experts in all layers, as far as these divide."""
    kept = np.full(space.searched[1], space.log2_kept(space.retained))
    return space.genome(log2_kept=kept, exponents=np.array(ENERGY_EXPONENTS))


def keeping(genome: CapacityGenome, count: int) -> CapacityGenome:
    """The same candidate with so many experts, where their number is searched."""
    return replace(genome, log2_kept=np.full_like(genome.log2_kept, genome.space.log2_kept(count)))


def fewest(space: CapacitySpace) -> CapacityGenome:
    """As few experts as the search may keep."""
    return keeping(equal(space), space.fewest)


def middle(space: CapacitySpace) -> CapacityGenome:
    """Of the numbers of experts that the search may keep the one in the middle."""
    counts = sorted(space.counts) or [space.retained]
    return keeping(equal(space), counts[len(counts) // 2])


def _made(operator: str, make: Callable[[CapacitySpace], CapacityGenome]) -> Baseline:
    return Baseline(lambda space: Offspring(make(space), operator, ()), ("capacity",))


BASELINES = {
    "equal": _made("equal", equal),
    "middle": _made("middle", middle),
    "fewest": _made("fewest", fewest),
}


class CapacityCosts(ExpertsCosts[CapacitySpace]):
    """Costs of candidates with the mean capacity in all layers."""

    def counts(self, phase: PhaseConfig) -> tuple[int, int, int, int]:
        return self.space.retained, self.space.active, *self.space.parameters()

    def largest_layer(self) -> tuple[int, int]:
        resized = self.space.neuron_share is not None
        return self.space.width if resized else self.outline.intermediate, self.space.actives.most


def _space(section: CapacitySection, facts: ModelFacts, phases: Sequence[PhaseConfig]) -> CapacitySpace:
    """Make a space for phases that fill experts of other widths than the original ones."""
    for position, phase in enumerate(phases):
        filled = phase.repair is not None and phase.repair.neurons
        if phase.kind not in (*CapacitySpace.phase_kinds, "repair"):
            continue  # which is refused with the phases that suit this kind
        if not filled and section.neuron_share is not None:
            raise UserError(
                f"phases.{position}.repair.neurons: kept experts have another width (genome.neuron_share), which only "
                "neurons of all experts fill; set it to true"
            )
    return CapacitySpace.of(section, facts)


class CapacityFigures(GenomeFigures[CapacityGenome]):
    """Layers as rows, and original experts as columns; the colour is a kept expert's width."""

    subject = "kept experts"

    def page(self, genome: CapacityGenome, start: CapacityGenome | None) -> tuple[Figure, str]:
        with drawing(3.4) as figure:
            scale_below(figure, *_draw(figure, genome), "neurons per expert")
        return figure, "Which original experts every layer keeps, and with how many neurons; 0 are left out."

    def draw(self, figure: Any, genome: CapacityGenome, start: CapacityGenome | None, label: str) -> None:
        figure.suptitle(f"{self.subject} of {label}", fontsize="medium")
        image, grid = _draw(figure, genome)
        figure.colorbar(image, ax=grid.ravel().tolist(), shrink=0.8, label="neurons per expert")

    def outline(self, genome: CapacityGenome) -> GenomeOutline:
        space = genome.space
        names = ("routing weights", "output norms", "numbers of tokens")
        settings = [("kept experts", f"{genome.retained} of {space.experts}")]
        settings.extend(
            (f"exponent of {name}", f"{each:.2g}") for name, each in zip(names, genome.exponents, strict=True)
        )
        if len(genome.tasks):
            shares = (genome.task_weights / genome.task_weights.max()).tolist()
            settings.extend((f"weight of task {place}", f"{share:.2g}") for place, share in enumerate(shares, start=1))
        columns = [("neurons per expert", space.facts.expert_neurons, (genome.width,) * space.layers)]
        if len(genome.log_active):
            columns.append(("active experts", space.facts.active, genome.active))
        return GenomeOutline(
            tuple(settings),
            space.experts,
            tuple((label, whole) for label, whole, _ in columns),
            tuple(
                LayerOutline(layer, tuple(kept), tuple(sizes))
                for layer, kept, *sizes in zip(
                    space.facts.moe_layers, genome.kept.tolist(), *(sizes for *_, sizes in columns), strict=True
                )
            ),
        )


def _draw(figure: Any, genome: CapacityGenome) -> tuple[Any, Any]:
    """Draw the heat map and return its image and panels."""
    neurons = np.zeros((genome.space.layers, genome.space.experts))
    np.put_along_axis(neurons, genome.kept, genome.width, axis=1)
    grid = figure.subplots(1, 1, squeeze=False)
    image = grid[0, 0].imshow(neurons, cmap=SEQUENTIAL, vmin=0, aspect="auto", interpolation="none")
    grid[0, 0].set_xlabel("original expert")
    grid[0, 0].set_ylabel("MoE layer")
    ticks(grid[0, 0], genome.space.experts, genome.space.layers)
    return image, grid


CAPACITY = GenomeKind(
    section=CapacitySection,
    make_space=_space,
    costs=CapacityCosts,
    figures=CapacityFigures(),
    baselines=BASELINES,
    repairable=True,
    recombinable=True,
)
