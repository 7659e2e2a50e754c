"""Widths of ToMoE's experts, layer by layer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from moevolve.search.figures.heatmaps import spread
from moevolve.search.figures.style import BLUE, GREEN, GREY, drawing
from moevolve.search.genomes.base import GenomeFigures
from moevolve.search.genomes.tomoe.genome import ToMoeGenome
from moevolve.workers.methods.tomoe.edit import ToMoeEdit

if TYPE_CHECKING:
    from moevolve.search.figures.style import Figure


class ToMoeFigures(GenomeFigures[ToMoeGenome]):
    """Neurons per layer: of one expert, of all experts together, and of the whole network."""

    subject = "widths"
    weights = "router's softmax"

    def page(self, genome: ToMoeGenome, start: ToMoeGenome | None) -> tuple[Figure, str]:
        return widths_figure(
            genome.express()
        ), "Neurons that one expert keeps in each layer, and that any expert keeps."

    def draw(self, figure: Any, genome: ToMoeGenome, start: ToMoeGenome | None, label: str) -> None:
        figure.suptitle(f"{self.subject} of {label}", fontsize="medium")
        _draw(figure, genome.express())
        figure.legend(loc="outside right upper")


def widths_figure(edit: ToMoeEdit) -> Figure:
    """The widths on a narrow page."""
    with drawing(2.6) as figure:
        _draw(figure, edit)
        figure.legend(loc="outside upper center", ncols=3, columnspacing=1.2, handlelength=1.6)
        return figure


def _draw(figure: Any, edit: ToMoeEdit) -> None:
    layers = np.arange(edit.layers)
    unions = edit.kept.any(axis=1).sum(axis=1)
    axes = figure.subplots()
    axes.bar(layers, unions, width=0.75, color=GREEN, alpha=0.45, label="any expert (union)")
    axes.bar(layers, edit.widths, width=0.5, color=BLUE, label="one expert (width)")
    axes.axhline(edit.width, color=GREY, linestyle="--", linewidth=1.2, label="whole network")
    axes.set_xlabel("layer")
    axes.set_ylabel("neurons")
    axes.set_xticks(spread(edit.layers, 12))
    axes.set_ylim(0, edit.width * 1.05)
