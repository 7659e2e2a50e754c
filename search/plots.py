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
_MAX_GROUPS = 8


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
        UserError: nothing was evaluated yet, the suffix names no known format, or the file can't be written.
    """
    from matplotlib.figure import Figure

    if not any(row.fitness is not None for row in history):
        raise UserError(f"{title}: no evaluated individual to plot yet")
    groups = 0 if genome is None else genome.space.groups
    figure = Figure(figsize=(max(8.0, 2.0 * min(groups, _MAX_GROUPS)), 4.0 + 3.6 * bool(groups)), layout="constrained")
    if path.suffix.lstrip(".").lower() not in figure.canvas.get_supported_filetypes():
        known = ", ".join(sorted(figure.canvas.get_supported_filetypes()))
        raise UserError(f"{path}: unknown picture format; use one of {known}")
    figure.suptitle(title)
    heights = [4.0, 3.6] if groups else [4.0]
    course, *below = figure.subfigures(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0]
    _draw_course(course.subplots(), history, full)
    if genome is not None:
        _draw_matrices(below[0], genome, genome_label)
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise UserError(f"{path}: can't be written: {error.strerror or error}") from error


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
    best = np.maximum.accumulate(values)
    axes.plot(indices, best, color="black", linewidth=1.3, drawstyle="steps-post", label="best so far")
    failed = [row.index for row in history if row.status == "failed"]
    if failed:
        # They have no score: on the lower edge, whatever the scores' range is.
        edge = axes.get_xaxis_transform()
        axes.scatter(failed, [0.025] * len(failed), marker="x", s=18, color="#D55E00", label="failed", transform=edge)
    if full is not None:
        axes.axhline(100 * full, color="grey", linestyle="--", linewidth=1.0, label="full model")
    axes.margins(y=0.1)
    axes.set_xlabel("individual (in order of creation)")
    axes.set_ylabel("score on the search split [%]")
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=6, fontsize="small", frameon=False)
    axes.grid(alpha=0.25)


def _draw_matrices(figure: Figure, genome: EepGenome, label: str) -> None:
    """Router mapping above, expert merging below, one column per group of layers (paper: Fig. 8)."""
    mapping, merging = genome.canonical
    shown = min(genome.space.groups, _MAX_GROUPS)
    picked = np.linspace(0, genome.space.groups - 1, shown).round().astype(int)
    left_out = f" ({shown} of {genome.space.groups} groups)" if shown < genome.space.groups else ""
    figure.suptitle(f"matrices of {label}{left_out}", fontsize="medium")
    limit = float(max(1.0, np.abs(mapping).max(), np.abs(merging).max()))
    grid = figure.subplots(2, shown, squeeze=False, sharex=True, sharey=True)
    for row, (matrices, name) in enumerate(((mapping, "router mapping"), (merging, "expert merging"))):
        grid[row, 0].set_ylabel(f"{name}\nnew expert", fontsize="small")
        for axes, group in zip(grid[row], picked, strict=True):
            image = axes.imshow(matrices[group], cmap=_HEAT, vmin=-limit, vmax=limit, aspect="auto")
            axes.tick_params(labelsize="x-small")
    for axes, group in zip(grid[0], picked, strict=True):
        axes.set_title(_layers_of(genome, int(group)), fontsize="small")
    for axes in grid[1]:
        axes.set_xlabel("original expert", fontsize="small")
        axes.set_xticks(range(0, genome.space.experts, -(-genome.space.experts // 8)))
        axes.set_yticks(range(0, genome.space.retained, -(-genome.space.retained // 8)))
    figure.colorbar(image, ax=grid.ravel().tolist(), shrink=0.8, label="coefficient")


def _layers_of(genome: EepGenome, group: int) -> str:
    """The decoder layers of a group."""
    layers = genome.space.facts.moe_layers
    members = [layer for layer, owner in zip(layers, genome.space.layer_groups, strict=True) if owner == group]
    return f"layer {members[0]}" if len(members) == 1 else f"layers {members[0]}-{members[-1]}"
