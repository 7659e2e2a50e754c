"""The kept experts of every layer and their widths as one heat map."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from moevolve.search.drawing import SEQUENTIAL, drawing, scale_below, ticks
from moevolve.search.genomes.capacity.space import CapacityGenome
from moevolve.search.genomes.contract.kind import GenomeFigures
from moevolve.search.genomes.contract.outline import GenomeOutline, LayerOutline

if TYPE_CHECKING:
    from moevolve.search.drawing import Figure


class CapacityFigures(GenomeFigures[CapacityGenome]):
    """Layers as rows, and original experts as columns; the colour is a kept expert's width."""

    subject = "kept experts"
    weights = "routing weights"

    def has_figure(self, genome: CapacityGenome, start: CapacityGenome | None) -> bool:
        return True

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
