"""Scores of a search over its individuals (EEP, Fig. 5)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from moevolve.evaluators.scales import SCALES, ScaleName
from moevolve.search.drawing import GREY, INK, MANY_MARKS, PHASE_COLOURS, RED, drawing
from moevolve.store.records import IndividualRecord

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Width of a legend's entry in inches.
_LEGEND_WIDTH = 1.35


def fitness_figure(history: Sequence[IndividualRecord], full: float | None, scale: ScaleName) -> Figure:
    """Draw the fitness curve alone, of a search with at least one evaluated individual."""
    with drawing(3.1) as figure:
        draw_fitness(figure.subplots(), history, full, scale)
        return figure


def draw_fitness(axes: Axes, history: Sequence[IndividualRecord], full: float | None, scale: ScaleName) -> None:
    """Draw every individual as a dot, the best so far as a line, and the full model as another (EEP, Fig. 5)."""
    shown = SCALES[scale]
    phases = list(dict.fromkeys(row.phase for row in history))
    for phase, colour in zip(phases, PHASE_COLOURS, strict=False):
        rows = [row for row in history if row.phase == phase and row.fitness is not None]
        axes.scatter(
            [row.index for row in rows],
            [shown.value(row.fitness or 0) for row in rows],
            s=9,
            color=colour,
            alpha=0.75,
            label=phase,
            rasterized=len(rows) > MANY_MARKS,
        )
    scored = [(row.index, row.fitness) for row in history if row.fitness is not None]
    indices, values = zip(*scored, strict=True)
    best = [shown.value(value) for value in np.maximum.accumulate(values).tolist()]
    axes.plot(indices, best, color=INK, linewidth=1.3, drawstyle="steps-post", label="best so far")
    failed = [row.index for row in history if row.status == "failed"]
    if failed:
        # They have no score, so they stand at the lower edge whatever the range of scores is.
        edge = axes.get_xaxis_transform()
        axes.scatter(failed, [0.025] * len(failed), marker="x", s=18, color=RED, label="failed", transform=edge)
    if full is not None:
        axes.axhline(shown.value(full), color=GREY, linestyle="--", linewidth=1.2, label="full model")
    axes.margins(y=0.1)
    axes.set_xlabel("individual (in order of creation)")
    axes.set_ylabel(f"{shown.title}\non the search split")
    if shown.is_reciprocal:
        # Perplexities of candidates range over decades, and their ratios matter.
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:.4g}")
        axes.yaxis.set_minor_formatter("{x:.4g}")
        axes.grid(which="minor", alpha=0.25)
    legend_above(axes)
    axes.grid(alpha=0.25)


def legend_above(axes: Axes) -> None:
    """Put a legend above the axes, in as many columns as fit."""
    handles, labels = axes.get_legend_handles_labels()
    figure = axes.get_figure(root=True)
    assert figure is not None
    columns = max(1, min(len(labels), int(figure.get_size_inches()[0] // _LEGEND_WIDTH)))
    if handles:
        axes.legend(
            loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=columns, fontsize="small", frameon=False, borderpad=0
        )
