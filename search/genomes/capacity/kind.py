"""The genome kind `capacity`: its one-shot candidates, what candidates cost, and how they are drawn.

One-shot candidates keep the experts of the most energy. Where the number of kept experts is searched, `equal`, `rising`
and `coverage` keep the largest one; `fewest` and `fewest_rising` are `equal` and `rising` with the smallest one, and
`middle` is `equal` with the one in the middle.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from moevolve.evaluators.errors import UserError
from moevolve.search.drawing import SEQUENTIAL, drawing, scale_below, ticks
from moevolve.search.genomes.capacity.space import (
    SUMS,
    CapacityGenome,
    CapacitySection,
    CapacitySpace,
    expert_importance,
)
from moevolve.search.genomes.contract.base import Offspring
from moevolve.search.genomes.contract.kind import Baseline, GenomeFigures, GenomeKind
from moevolve.search.genomes.contract.outline import GenomeOutline, LayerOutline
from moevolve.search.genomes.contract.phases import CapacityPhase, PhaseConfig, divides_neurons
from moevolve.search.genomes.experts.costs import ExpertsCosts
from moevolve.workers.contract.facts import ModelFacts

if TYPE_CHECKING:
    from moevolve.search.drawing import Figure


ENERGY_EXPONENTS = (2.0, 2.0, 0.0)
"""With these, importance is energy: the sum over an expert's tokens of squares of routing weight times output norm."""
# Shares are in [0, 1], and float64 can't tell those apart that 60 halvings leave.
_BISECTIONS = 60


def equal(space: CapacitySpace) -> CapacityGenome:
    """The same width in all layers, and as many active experts, as far as these divide."""
    kept = np.full(space.searched[1], space.log2_kept(space.retained))
    return space.genome(log2_kept=kept, exponents=np.array(ENERGY_EXPONENTS))


def keeping(genome: CapacityGenome, count: int) -> CapacityGenome:
    """The same candidate with so many experts, where their number is searched."""
    return replace(genome, log2_kept=np.full_like(genome.log2_kept, genome.space.log2_kept(count)))


def fewest(genome: CapacityGenome) -> CapacityGenome:
    """The same candidate with as few experts as the search may keep, which are as wide as original ones on average."""
    return keeping(genome, genome.space.fewest)


def middle(space: CapacitySpace) -> CapacityGenome:
    """All layers equally wide, and of the numbers of experts that the search may keep the one in the middle."""
    counts = sorted(space.counts) or [space.retained]
    return keeping(equal(space), counts[len(counts) // 2])


def rising(space: CapacitySpace) -> CapacityGenome:
    """Widths that rise linearly with depth, from half to one and a half of the mean."""
    widths = np.linspace(0.5, 1.5, space.layers) if space.layers > 1 else np.ones(1)
    return replace(equal(space), log_widths=np.log(widths))


def coverage(space: CapacitySpace) -> CapacityGenome:
    """Widths by how many experts of a layer hold the same share of its importance.

    The share is found by bisection, so that the experts counted in all layers together have as many neurons as are
    kept. Importance is the sum over tokens of routing weight times output norm; experts are counted from the most
    important one on, with a fraction of the last.
    """
    sums = space.statistics[SUMS].astype(np.float64).sum(axis=0)
    values = -np.sort(-expert_importance(sums, np.array([1.0, 1.0, 0.0])), axis=1)
    held = np.pad(np.cumsum(values, axis=1) / values.sum(axis=1, keepdims=True), ((0, 0), (1, 0)))
    places = np.arange(space.experts + 1)
    low, high = 0.0, 1.0
    for _ in range(_BISECTIONS):
        share = (low + high) / 2
        counts = np.array([np.interp(share, layer, places) for layer in held])
        low, high = (share, high) if counts.sum() <= space.layers * space.share * space.experts else (low, share)
    return replace(equal(space), log_widths=np.log(counts))


def _made(operator: str, make: Callable[[CapacitySpace], CapacityGenome]) -> Baseline:
    return Baseline(lambda space: Offspring(make(space), operator, ()), ("capacity",))


BASELINES = {
    "equal": _made("equal", equal),
    "fewest": _made("fewest", lambda space: fewest(equal(space))),
    "fewest_rising": _made("fewest_rising", lambda space: fewest(rising(space))),
    "middle": _made("middle", middle),
    "rising": _made("rising", rising),
    "coverage": _made("coverage", coverage),
}


class CapacityCosts(ExpertsCosts[CapacitySpace]):
    """Costs of candidates with the mean capacity in all layers."""

    def counts(self, phase: PhaseConfig) -> tuple[int, int, int, int]:
        return self.space.retained, self.space.active, *self.space.parameters()

    def largest_layer(self, uneven: bool) -> tuple[int, int]:
        resized = uneven or self.space.neuron_share is not None
        return self.space.widths.largest if resized else self.outline.intermediate, self.space.actives.most


def _space(section: CapacitySection, facts: ModelFacts, phases: Sequence[PhaseConfig]) -> CapacitySpace:
    """Make a space for phases that fill experts of other widths than the original ones."""
    divided = any(map(divides_neurons, phases))
    for position, phase in enumerate(phases):
        filled = phase.repair is not None and phase.repair.neurons is not None
        if phase.kind not in (*CapacitySpace.phase_kinds, "repair"):
            continue  # which is refused with the phases that suit this kind
        if not filled and (section.neuron_share is not None or (divided and phase.kind == "repair")):
            raise UserError(
                f"phases.{position}.repair.neurons: kept experts have other widths (genome.neuron_share, or searched "
                "widths), which only neurons of all experts fill; set it, or {}"
            )
    equal = all(phase.widths == "equal" for phase in phases if isinstance(phase, CapacityPhase))
    return CapacitySpace.of(section, facts, equal)


class CapacityFigures(GenomeFigures[CapacityGenome]):
    """Layers as rows, and original experts as columns; the colour is a kept expert's width."""

    subject = "kept experts"
    weights = "routing weights"

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
        columns = [("neurons per expert", space.facts.expert_neurons, genome.widths)]
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
    np.put_along_axis(neurons, genome.kept, np.array(genome.widths, dtype=np.float64)[:, None], axis=1)
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
