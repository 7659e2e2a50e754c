"""Scores of a search over individuals (EEP, Fig. 5), against size, and against measured speed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from moevolve.evaluators.scales import SCALES, Scale, ScaleName
from moevolve.search.drawing import BLUE, GREEN, GREY, INK, MANY_MARKS, PHASE_COLOURS, RED, drawing
from moevolve.search.results.kept import SizePoint
from moevolve.store.records import IndividualRecord

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Width of a legend's entry in inches.
_LEGEND_WIDTH = 1.35
# Shortest range of an axis of sizes, in percentage points.
_LEAST_SPAN = 4.0


def fitness_figure(history: Sequence[IndividualRecord], full: float | None, scale: ScaleName) -> Figure:
    """Draw the fitness curve alone, of a search with at least one evaluated individual."""
    with drawing(3.1) as figure:
        draw_fitness(figure.subplots(), history, full, scale)
        return figure


def label_scores(axes: Axes, scale: Scale, of: str = "") -> None:
    """Label the vertical axis as one of scores of something, and make it logarithmic for perplexities."""
    axes.set_ylabel(f"{scale.title}{of}")
    if scale.is_reciprocal:
        # Perplexities of candidates range over decades, and their ratios matter.
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:.4g}")
        axes.yaxis.set_minor_formatter("{x:.4g}")
        axes.grid(which="minor", alpha=0.25)


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
    label_scores(axes, shown, "\non the search split")
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


def pareto_front(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the (size, score) points that no other beats in both, from the smallest to the largest size."""
    front: list[tuple[float, float]] = []
    for size, score in sorted(points, key=lambda point: (point[0], -point[1])):
        if not front or score > front[-1][1]:
            front.append((size, score))
    return front


# What `kept_figure` shows.
KEPT_CAPTION = (
    "Share of the full model's score that the winners of this store's searches on the same data keep on the dev split, "
    "with 90 % intervals, against their size. Of perplexities, it is the share of the candidate's log perplexity that "
    "the full model has."
)


def kept_figure(points: Sequence[SizePoint]) -> Figure:
    """Draw the share of the full model's score that winners keep against their size, with the Pareto front."""
    sizes, shares = [100 * point.parameters for point in points], [100 * point.kept.share for point in points]
    ends = [(100 * (each.share - each.low), 100 * (each.high - each.share)) for each in (one.kept for one in points)]
    with drawing(3.0) as figure:
        axes = figure.subplots()
        spans = np.maximum(np.array(ends).T, 0)  # bounds have a centre of their own
        axes.errorbar(sizes, shares, yerr=spans, fmt="o", markersize=3, color=BLUE, linewidth=0.8, label="winners")
        front = pareto_front(list(zip(sizes, shares, strict=True)))
        axes.plot(
            *zip(*front, strict=True), color=GREEN, linewidth=1.3, marker="o", markersize=3, label="not beaten in both"
        )
        axes.plot(100, 100, marker="D", color=GREY, linestyle="", label="full model")
        axes.set_xlabel("parameters kept [% of the full model's]")
        axes.set_ylabel("score kept on the dev split\n[% of the full model's]")
        legend_above(axes)
        axes.grid(alpha=0.25)
        return figure
