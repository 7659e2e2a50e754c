"""Drawings of how a search changed the partition of a network's neurons into experts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from moevolve.search.drawing import (
    MAX_ROWS,
    SEQUENTIAL,
    WIDE,
    drawing,
    label_edges,
    panels,
    scale_below,
    shown_note,
    spread,
    ticks,
)
from moevolve.search.genomes.contract.kind import GenomeFigures
from moevolve.search.genomes.contract.outline import GenomeOutline
from moevolve.search.genomes.factorllm.space import FactorLlmGenome
from moevolve.workers.methods.factorllm.edit import FactorLlmEdit

if TYPE_CHECKING:
    from moevolve.search.drawing import Figure

_IN_COMMON = "neurons in common"


class FactorLlmFigures(GenomeFigures[FactorLlmGenome]):
    """The partition compared with the one that the search started from."""

    subject = "division"

    def has_figure(self, genome: FactorLlmGenome, start: FactorLlmGenome | None) -> bool:
        return start is not None

    def page(self, genome: FactorLlmGenome, start: FactorLlmGenome | None) -> tuple[Figure, str]:
        assert start is not None
        caption = "Neurons that each expert has in common with the experts that the search started from."
        caption += shown_note(genome.space.dense.layers, 2 * MAX_ROWS, "layers")
        return partition_figure(genome.express(), start.express()), caption

    def outline(self, genome: FactorLlmGenome) -> GenomeOutline:
        closed = int((genome.base_router > 0).sum())
        routers = f"{closed} of {genome.space.dense.layers} layers from a closed form"
        return GenomeOutline((("configuration", genome.space.name), ("routers", routers)))

    def draw(self, figure: Any, genome: FactorLlmGenome, start: FactorLlmGenome | None, label: str) -> None:
        assert start is not None
        edit = genome.express()
        figure.suptitle(f"{self.subject} of {label}", fontsize="medium")
        columns = min(edit.layers, WIDE)
        rows = min(2, -(-edit.layers // columns))
        image, grid = _draw(figure, edit, start.express(), columns, rows)
        figure.colorbar(image, ax=grid.ravel().tolist(), shrink=0.8, label=_IN_COMMON)


def neurons_moved(edit: FactorLlmEdit, start: FactorLlmEdit) -> NDArray[np.int64]:
    """Count the neurons of each expert of `edit` by their expert in `start`: int64 [layers, N, N]."""
    width = edit.width // edit.experts
    owner = np.argsort(start.order, axis=1) // width
    there = np.take_along_axis(owner, edit.order.astype(np.int64), axis=1).reshape(edit.layers, edit.experts, width)
    counts: NDArray[np.int64] = (there[..., None] == np.arange(edit.experts)).sum(axis=2)
    return counts


def partition_figure(edit: FactorLlmEdit, start: FactorLlmEdit) -> Figure:
    """Draw the partition for a narrow page."""
    rows = -(-min(edit.layers, 2 * MAX_ROWS) // 2)
    with drawing(0.85 + 2.0 * rows, squares=True) as figure:
        image, grid = _draw(figure, edit, start, 2, rows)
        scale_below(figure, image, grid, _IN_COMMON)
        return figure


def _draw(figure: Any, edit: FactorLlmEdit, start: FactorLlmEdit, columns: int, rows: int) -> tuple[Any, Any]:
    """Draw a panel per layer; return an image for the colour scale, and the panels."""
    moved, most = neurons_moved(edit, start), edit.width // edit.experts
    picked = spread(len(moved), columns * rows)
    grid = panels(figure, rows, columns, len(picked))
    for axes, layer in zip(grid.ravel(), picked, strict=False):
        image = axes.imshow(moved[layer], cmap=SEQUENTIAL, vmin=0, vmax=most, interpolation="none")
        axes.set_title(f"layer {layer}", fontsize=8)
        ticks(axes, edit.experts, edit.experts)
    label_edges(grid, "expert at the start", "expert now")
    return image, grid
