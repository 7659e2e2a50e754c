"""The genome kind `eep`, what its candidates cost, and matrices as heat maps (paper: Fig. 8)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from moevolve.evaluators.errors import UserError
from moevolve.search.drawing import DIVERGING, MAX_ROWS, scale_below, shown_note, spread, ticks
from moevolve.search.genomes.contract.costs import FitOutline, GenomeCosts
from moevolve.search.genomes.contract.kind import GenomeFigures, GenomeKind
from moevolve.search.genomes.contract.outline import GenomeOutline, LayerOutline
from moevolve.search.genomes.contract.phases import PhaseConfig
from moevolve.search.genomes.eep.baselines import BASELINES, expert_measurements
from moevolve.search.genomes.eep.section import EepSection
from moevolve.search.genomes.eep.space import EepGenome, EepSpace
from moevolve.workers.contract.edits import ROW_TOKENS, combined, measurement_parts
from moevolve.workers.contract.facts import ModelFacts
from moevolve.workers.methods.eep.edit import ExpertsMeasurement

if TYPE_CHECKING:
    from moevolve.search.drawing import AnyFigure, Panels, ScalarMappable


class EepCosts(GenomeCosts[EepSpace]):
    """Costs of EEP candidates; of several numbers of retained experts the largest one counts.

    Routers run over all n experts; a continuous mapping is applied to their scores, or, in logits space, folded into
    the router.
    """

    def counts(self, phase: PhaseConfig) -> tuple[int, int, int, int]:
        return self.space.retained, self.space.active, *self.space.parameters(one_hot=phase.kind != "merge")

    def buffer_bytes(self, phases: Iterable[str], host: bool, repaired: bool) -> int:
        """Kept experts are copied if merged, repaired, or on the host; of shared experts, repairs copy one matrix."""
        facts, total = self.outline.facts, 0
        if repaired:
            total += len(facts.moe_layers) * facts.shared_neurons * self.outline.hidden * facts.dtype_bytes
        if host or repaired or "merge" in phases:
            kept = self.outline.experts_bytes * self.space.retained // self.space.experts
            if self.space.neuron_share is not None:
                kept = kept * self.space.width // self.outline.intermediate
            total += kept
        return total

    def calibration_bytes(self, longest: int) -> int:
        """Measuring experts needs more memory than the thresholds of dynamic skipping."""
        # Imported here because it imports torch, which most users of genomes don't need.
        from moevolve.workers.methods.eep.calibrate_experts import measuring_bytes

        # Short sequences share a row of the batch.
        sizes = self.outline.facts, self.outline.hidden, self.outline.row_bytes, max(longest, ROW_TOKENS)
        measured = (part for part in measurement_parts(self.space.measurement) if isinstance(part, ExpertsMeasurement))
        return max((measuring_bytes(part, *sizes) for part in measured), default=0)

    def fitted_maps(self) -> tuple[tuple[FitOutline, ...], ...]:
        """Return the output projections of a layer's experts are fitted together."""
        space, dense = self.space, self.outline.facts.shared_neurons
        width = self.outline.intermediate if space.neuron_share is None else space.width
        fit = FitOutline(space.retained * width + dense, space.retained, space.active / space.retained, dense)
        routed = self.outline.facts.moe_layers
        return tuple((fit,) if layer in routed else () for layer in range(self.outline.layers))


def _space(section: EepSection, facts: ModelFacts, phases: Sequence[PhaseConfig]) -> EepSpace:
    """Make a space whose measurement includes those for surrogates and baselines.

    Raises:
        UserError: The model doesn't support the settings, or a phase doesn't fill experts of another width.
    """
    space = EepSpace.of(section, facts)
    for position, phase in enumerate(phases):
        if section.neuron_share is None or phase.kind not in (*section.phase_kinds, "repair"):
            continue
        if phase.kind == "merge":
            raise UserError(
                f"phases.{position}.kind: a merge phase merges whole experts, and kept experts have another width "
                "(genome.neuron_share); use prune"
            )
        if phase.repair is None or not phase.repair.neurons:
            raise UserError(
                f"phases.{position}.repair.neurons: kept experts have another width (genome.neuron_share), which only "
                "neurons of all experts fill; set it to true"
            )
    return replace(space, measurement=combined(*expert_measurements(space, section, phases), space.measurement))


# Smallest coefficient with which an original expert counts as part of a new one.
_MIN_COEFFICIENT = 1e-6
_NAMES = ("router mapping", "expert merging")


class EepFigures(GenomeFigures[EepGenome]):
    """Router mapping and expert merging, group by group, or of a genome that only prunes the experts kept per layer."""

    subject = "experts"

    def height(self, genome: EepGenome) -> float:
        share = min(1.0, genome.retained / genome.space.experts)
        return 3.0 if genome.one_hot else 0.9 + min(genome.space.groups, MAX_ROWS) * (0.55 + 1.55 * share)

    def draw(self, figure: AnyFigure, genome: EepGenome) -> None:
        """Draw a row per group of layers, router mapping left of expert merging."""
        if genome.one_hot:
            _draw_kept(figure, genome)
            return
        picked = spread(genome.space.groups, MAX_ROWS)
        grid = figure.subplots(len(picked), 2, squeeze=False, sharex=True, sharey=True)
        image = _draw_matrices(grid.T, genome, picked)
        for axes, group in zip(grid[:, 0], picked, strict=True):
            axes.set_ylabel(f"{_layers(genome, int(group))}\nnew expert")
        for axes, name in zip(grid[0], _NAMES, strict=True):
            axes.set_title(name)
        for axes in grid[-1]:
            axes.set_xlabel("original expert")
        scale_below(figure, image, grid, "coefficient")

    def caption(self, genome: EepGenome) -> str:
        if genome.one_hot:
            return "Filled cells are the original experts that every layer keeps."
        caption = "Rows are new experts: how much of each original expert's routing weight and weights they take."
        return caption + shown_note(genome.space.groups, MAX_ROWS, "groups of layers")

    def outline(self, genome: EepGenome) -> GenomeOutline:
        space = genome.own_space
        kept = ("kept experts", f"{space.retained} of {space.experts}")
        resized = space.neuron_share is not None
        return GenomeOutline(
            (kept,) if genome.one_hot else (kept, ("experts are", "merged")),
            space.experts,
            (("neurons per expert", space.facts.expert_neurons),) if resized else (),
            tuple(
                LayerOutline(layer, tuple(np.flatnonzero(used).tolist()), (space.width,) if resized else ())
                for layer, used in zip(space.facts.moe_layers, _used(genome), strict=True)
            ),
        )


def _used(genome: EepGenome) -> NDArray[np.bool_]:
    """Return which original experts are part of a new one in each MoE layer: bool [layers, n]."""
    used: NDArray[np.bool_] = np.any(np.abs(genome.expert_merging) > _MIN_COEFFICIENT, axis=1)
    return used[list(genome.space.layer_groups)]


def _draw_kept(figure: AnyFigure, genome: EepGenome) -> None:
    axes, used = figure.subplots(), _used(genome)
    axes.imshow(used, cmap="Blues", vmin=0, vmax=1.3, aspect="auto", interpolation="none")
    axes.set_xlabel("original expert")
    axes.set_ylabel("MoE layer")
    ticks(axes, used.shape[1], used.shape[0])


def _draw_matrices(grid: Panels, genome: EepGenome, picked: Iterable[int]) -> ScalarMappable:
    """Draw the matrices of some groups on axes [2, groups], router mappings first, and return the last image."""
    limit = float(max(1.0, *(np.abs(matrices).max() for matrices in genome.canonical)))  # white is 0
    for row, matrices in zip(grid, genome.canonical, strict=True):
        for axes, group in zip(row, picked, strict=True):
            image = axes.imshow(
                matrices[group], cmap=DIVERGING, vmin=-limit, vmax=limit, aspect="auto", interpolation="none"
            )
            ticks(axes, genome.space.experts, genome.retained)
    return image


def _layers(genome: EepGenome, group: int) -> str:
    """Name the decoder layers of a group."""
    layers = genome.space.facts.moe_layers
    members = [layer for layer, owner in zip(layers, genome.space.layer_groups, strict=True) if owner == group]
    return f"layer {members[0]}" if len(members) == 1 else f"layers {members[0]}-{members[-1]}"


EEP = GenomeKind(
    section=EepSection,
    make_space=_space,
    costs=EepCosts,
    figures=EepFigures(),
    baselines=BASELINES,
    repairable=True,
    recombinable=True,
    baseline_settings={"genome.groups": "per_layer"},
)
