"""Score against measured speed, of a few models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from moevolve.search.figures.fitness import draw_front, pareto_front
from moevolve.search.figures.style import BLUE, drawing

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_PANEL = 3.0
"""Width and height of a panel in inches."""


def speed_figure(scores: Mapping[str, float], rates: Mapping[int, Sequence[float]]) -> Figure:
    """Draw scores against answers per second, a panel per batch size, with the Pareto front.

    Args:
        scores: Scores of the models, from 0 to 1, by name.
        rates: Answers per second of these models, by batch size.
    """
    percent = [100 * score for score in scores.values()]
    with drawing(_PANEL, _PANEL * len(rates)) as figure:
        panels = figure.subplots(1, len(rates), sharey=True, squeeze=False)[0]
        for axes, (batch_size, speeds) in zip(panels, rates.items(), strict=True):
            axes.scatter(speeds, percent, s=14, color=BLUE, label="models")
            # `pareto_front` prefers small sizes; speeds are better when large.
            front = pareto_front([(-speed, score) for speed, score in zip(speeds, percent, strict=True)])
            draw_front(axes, [(-negated, score) for negated, score in front], "no other is faster and better")
            for name, speed, score in zip(scores, speeds, percent, strict=True):
                axes.annotate(name, (speed, score), xytext=(3, 4), textcoords="offset points", fontsize="x-small")
            axes.margins(x=0.2, y=0.15)
            axes.set_xlabel(f"answers per second, batches of {batch_size}")
            axes.grid(alpha=0.25)
        panels[0].set_ylabel("score [%]")
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper center", ncols=2)
        return figure
