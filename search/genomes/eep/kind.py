"""The genome kind `eep`, with the costs of its candidates, and matrices as heat maps (paper: Fig. 8)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import comb
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from moevolve.search.drawing import DIVERGING, MAX_ROWS, drawing, scale_below, shown_note, spread, ticks
from moevolve.search.genomes.contract.kind import GenomeFigures, GenomeKind
from moevolve.search.genomes.contract.outline import GenomeOutline, LayerOutline
from moevolve.search.genomes.contract.phases import PhaseConfig
from moevolve.search.genomes.eep.baselines import BASELINES, expert_measurements
from moevolve.search.genomes.eep.space import EepGenome, EepSection, EepSpace
from moevolve.search.genomes.experts.costs import ExpertsCosts
from moevolve.workers.contract.edits import combined
from moevolve.workers.contract.facts import ModelFacts

if TYPE_CHECKING:
    from moevolve.search.drawing import Figure


class EepCosts(ExpertsCosts[EepSpace]):
    """Costs of EEP candidates.

    Routers run over all n experts; a continuous mapping is applied to their scores, or, in logits space, folded into
    the router.
    """

    def counts(self, phase: PhaseConfig) -> tuple[int, int, int, int]:
        return self.space.retained, self.space.active, *self.space.parameters(one_hot=phase.kind != "merge")

    def distinct_candidates(self, phase: PhaseConfig) -> int | None:
        if phase.kind != "prune":
            return None
        subsets = self.space.subsets
        groups = subsets.routing_groups
        return comb(subsets.experts // groups, subsets.retained // groups) ** (groups * self.space.groups)


def _space(section: EepSection, facts: ModelFacts, phases: Sequence[PhaseConfig]) -> EepSpace:
    """Make a space whose measurement includes those for surrogates and baselines."""
    space = EepSpace.of(section, facts)
    return replace(space, measurement=combined(*expert_measurements(space, section, phases), space.measurement))


# Largest number of layer groups side by side on a wide page.
_MAX_GROUPS = 8
# Smallest coefficient with which an original expert counts as part of a new one.
_MIN_COEFFICIENT = 1e-6
# Width of a group in inches.
_GROUP_WIDTH = 2.0
_NAMES = ("router mapping", "expert merging")


class EepFigures(GenomeFigures[EepGenome]):
    """Router mapping and expert merging, group by group, or of a genome that only prunes the experts kept per layer."""

    subject = "experts"

    def page(self, genome: EepGenome, start: EepGenome | None) -> tuple[Figure, str]:
        """Draw a row per group of layers, router mapping left of expert merging."""
        if genome.one_hot:
            with drawing(3.0) as figure:
                _draw_kept(figure, genome)
            return figure, "Filled cells are the original experts that every layer keeps."
        picked = spread(genome.space.groups, MAX_ROWS)
        share = min(1.0, genome.space.retained / genome.space.experts)
        with drawing(0.9 + len(picked) * (0.55 + 1.55 * share)) as figure:
            grid = figure.subplots(len(picked), 2, squeeze=False, sharex=True, sharey=True)
            image = _draw_matrices(grid.T, genome, picked)
            for axes, group in zip(grid[:, 0], picked, strict=True):
                axes.set_ylabel(f"{_layers(genome, int(group))}\nnew expert")
            for axes, name in zip(grid[0], _NAMES, strict=True):
                axes.set_title(name)
            for axes in grid[-1]:
                axes.set_xlabel("original expert")
            scale_below(figure, image, grid, "coefficient")
        caption = "Rows are new experts: how much of each original expert's routing weight and weights they take."
        return figure, caption + shown_note(genome.space.groups, MAX_ROWS, "groups of layers")

    def draw(self, figure: Any, genome: EepGenome, start: EepGenome | None, label: str) -> None:
        """Draw router mapping above, expert merging below, and a column per group of layers."""
        if genome.one_hot:
            figure.suptitle(f"{self.subject} of {label} (kept ones are filled)", fontsize="medium")
            _draw_kept(figure, genome)
            return
        picked = spread(genome.space.groups, _MAX_GROUPS)
        some = f" ({len(picked)} of {genome.space.groups} groups)" if len(picked) < genome.space.groups else ""
        figure.suptitle(f"{self.subject} of {label}{some}", fontsize="medium")
        grid = figure.subplots(2, len(picked), squeeze=False, sharex=True, sharey=True)
        image = _draw_matrices(grid, genome, picked)
        for axes, name in zip(grid[:, 0], _NAMES, strict=True):
            axes.set_ylabel(f"{name}\nnew expert", fontsize="small")
        for axes, group in zip(grid[0], picked, strict=True):
            axes.set_title(_layers(genome, int(group)), fontsize="small")
        for axes in grid[1]:
            axes.set_xlabel("original expert", fontsize="small")
        figure.colorbar(image, ax=grid.ravel().tolist(), shrink=0.8, label="coefficient")

    def width(self, genome: EepGenome) -> float:
        return 0.0 if genome.one_hot else _GROUP_WIDTH * min(genome.space.groups, _MAX_GROUPS)

    def matrices(self, genome: EepGenome) -> dict[str, NDArray[np.float32]]:
        if genome.one_hot:
            return {}
        named = tuple(zip(_NAMES, genome.canonical, strict=True))
        return {
            f"{name}, {_layers(genome, group)}": matrices[group]
            for group in range(genome.space.groups)
            for name, matrices in named
        }

    def outline(self, genome: EepGenome) -> GenomeOutline:
        space = genome.space
        kept = ("kept experts", f"{space.retained} of {space.experts}")
        return GenomeOutline(
            (kept,) if genome.one_hot else (kept, ("experts are", "merged")),
            space.experts,
            layers=tuple(
                LayerOutline(layer, tuple(np.flatnonzero(used).tolist()))
                for layer, used in zip(space.facts.moe_layers, _used(genome), strict=True)
            ),
        )


def _used(genome: EepGenome) -> NDArray[np.bool_]:
    """Which original experts are part of a new one in each MoE layer: bool [layers, n]."""
    used: NDArray[np.bool_] = np.any(np.abs(genome.expert_merging) > _MIN_COEFFICIENT, axis=1)
    return used[list(genome.space.layer_groups)]


def _draw_kept(figure: Any, genome: EepGenome) -> None:
    axes, used = figure.subplots(), _used(genome)
    axes.imshow(used, cmap="Blues", vmin=0, vmax=1.3, aspect="auto", interpolation="none")
    axes.set_xlabel("original expert")
    axes.set_ylabel("MoE layer")
    ticks(axes, used.shape[1], used.shape[0])


def _draw_matrices(grid: Any, genome: EepGenome, picked: Iterable[Any]) -> Any:
    """Draw the matrices of some groups on axes [2, groups], router mappings first, and return the last image."""
    limit = float(max(1.0, *(np.abs(matrices).max() for matrices in genome.canonical)))  # white is 0
    for row, matrices in zip(grid, genome.canonical, strict=True):
        for axes, group in zip(row, picked, strict=True):
            image = axes.imshow(
                matrices[group], cmap=DIVERGING, vmin=-limit, vmax=limit, aspect="auto", interpolation="none"
            )
            ticks(axes, genome.space.experts, genome.space.retained)
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
