"""Pictures of a search: score over evaluations, and the matrices of an EEP genome as heat maps."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from moevolve.evaluators.errors import UserError
from moevolve.store.records import HistoryRow

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from moevolve.search.genomes.eep import EepGenome

# Okabe-Ito: distinguishable with any colour vision.
PHASE_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7")
_HEAT = "RdBu_r"


def plot_search(
    path: Path,
    title: str,
    history: Sequence[HistoryRow],
    full: float | None,
    genome: EepGenome | None,
    genome_label: str = "",
) -> None:
    """Write one figure: the course of the search on top, the matrices of `genome` below.

    Args:
        path: image file; its suffix chooses the format (png, svg, pdf).
        title: above the figure.
        history: the search's individuals in order.
        full: fitness of the unedited model, drawn as a line.
        genome: individual whose matrices are drawn; None leaves them out.
        genome_label: how to name it.

    Raises:
        UserError: nothing was evaluated yet, or the suffix names no known format.
    """
    from matplotlib.figure import Figure

    if not any(row.fitness is not None for row in history):
        raise UserError(f"{title}: no evaluated individual to plot yet")
    groups = 0 if genome is None else genome.space.groups
    figure = Figure(figsize=(max(8.0, 2.2 * min(groups, 8)), 4.0 + 3.6 * bool(groups)), layout="constrained")
    if path.suffix.lstrip(".").lower() not in figure.canvas.get_supported_filetypes():
        known = ", ".join(sorted(figure.canvas.get_supported_filetypes()))
        raise UserError(f"{path}: unknown picture format; use one of {known}")
    figure.suptitle(title)
    heights = [4.0, 3.6] if groups else [4.0]
    course, *below = figure.subfigures(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0]
    _draw_course(course.subplots(), history, full)
    if genome is not None:
        _draw_matrices(below[0], genome, genome_label)
    figure.savefig(path, dpi=150)


def _draw_course(axes: Axes, history: Sequence[HistoryRow], full: float | None) -> None:
    """Every individual as a dot, the best so far as a line (paper: Fig. 5)."""
    phases = list(dict.fromkeys(row.phase for row in history))
    for phase, colour in zip(phases, PHASE_COLOURS, strict=False):
        rows = [row for row in history if row.phase == phase and row.fitness is not None]
        axes.scatter(
            [row.index for row in rows],
            [100 * (row.fitness or 0) for row in rows],
            s=9,
            color=colour,
            alpha=0.6,
            label=phase,
        )
    scored = [(row.index, 100 * row.fitness) for row in history if row.fitness is not None]
    indices, values = zip(*scored, strict=True)
    axes.plot(indices, np.maximum.accumulate(values), color="black", linewidth=1.3, label="best so far")
    failed = [row.index for row in history if row.status == "failed"]
    if failed:
        axes.scatter(failed, [min(values)] * len(failed), marker="x", s=18, color="#D55E00", label="failed")
    if full is not None:
        axes.axhline(100 * full, color="grey", linestyle="--", linewidth=1.0, label="full model")
    axes.set_xlabel("individual (in order of creation)")
    axes.set_ylabel("score on the search split [%]")
    axes.legend(loc="lower right", fontsize="small")
    axes.grid(alpha=0.25)


def _draw_matrices(figure: Figure, genome: EepGenome, label: str) -> None:
    """Router mapping above, expert merging below, one column per group of layers (paper: Fig. 8)."""
    figure.suptitle(f"matrices of {label}", fontsize="medium")
    mapping, merging = genome.canonical
    shown = min(genome.space.groups, 8)
    picked = np.linspace(0, genome.space.groups - 1, shown).round().astype(int)
    limit = float(max(1.0, np.abs(mapping).max(), np.abs(merging).max()))
    grid = figure.subplots(2, shown, squeeze=False)
    image = None
    for column, group in enumerate(picked):
        members = [layer for layer, owner in enumerate(genome.space.layer_groups) if owner == group]
        where = f"layer {members[0]}" if len(members) == 1 else f"layers {members[0]}-{members[-1]}"
        for axes, matrices, name in zip(
            grid[:, column], (mapping, merging), ("router mapping", "expert merging"), strict=True
        ):
            image = axes.imshow(matrices[group], cmap=_HEAT, vmin=-limit, vmax=limit, aspect="auto")
            axes.set_title(f"{name}\n{where}" if name == "router mapping" else name, fontsize="small")
            axes.set_xlabel("original expert", fontsize="small")
            axes.set_ylabel("new expert", fontsize="small")
            axes.set_xticks(range(0, genome.space.experts, max(1, genome.space.experts // 8)))
            axes.set_yticks(range(0, genome.space.retained, max(1, genome.space.retained // 8)))
    if image is not None:
        figure.colorbar(image, ax=grid.ravel().tolist(), shrink=0.8, label="coefficient")
