"""What was searched of dense models: mixing matrices, widths, divisions of neurons."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from moevolve.search.figures.matrices import MAX_ROWS, spread, ticks
from moevolve.search.figures.style import BLUE, DIVERGING, GREEN, GREY, SEQUENTIAL, drawing, scale_below
from moevolve.search.genomes.base import Genome
from moevolve.search.genomes.factorllm.genome import FactorLlmGenome
from moevolve.search.genomes.nanomoe.space import NanoMoeGenome
from moevolve.search.genomes.tomoe.genome import ToMoeGenome
from moevolve.workers.methods.factorllm.edit import FactorLlmEdit
from moevolve.workers.methods.tomoe.edit import ToMoeEdit

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_WIDE = 6
"""Panels beside each other on a wide page."""


def mixing_change(genome: NanoMoeGenome) -> NDArray[np.float64]:
    """How far each block of M is from where the search started, [layers, K, K]: signed in variant I, else the root mean
    square over the block's parameters."""
    change = genome.mixing.astype(np.float64) - genome.space.form.unmixed
    if genome.space.form.variant == "I":
        return change
    if genome.space.form.variant == "III":
        change = np.moveaxis(change, 1, -1)
        change = change.reshape(*change.shape[:3], -1)
    size: NDArray[np.float64] = np.sqrt((change**2).mean(axis=-1))
    return size


def mixing_figure(genome: NanoMoeGenome) -> Figure:
    """The searched change of the mixing matrices, layer by layer."""
    return blocks_figure(*_mixing(genome))


def _mixing(genome: NanoMoeGenome) -> tuple[list[str], NDArray[np.float64], float | None, str]:
    """What `blocks_figure` takes."""
    names = [layer.name for layer in genome.space.layers]
    if genome.space.form.variant == "I":
        return names, mixing_change(genome), 0.0, "change of the mixing coefficient"
    return names, mixing_change(genome), None, "root mean square change of the block"


def blocks_figure(names: Sequence[str], blocks: NDArray[np.float64], neutral: float | None, what: str) -> Figure:
    """One number per block of linear layers' mixing matrices.

    Args:
        names: of the layers.
        blocks: [layers, K, K].
        neutral: the value in the middle of the scale, from which numbers differ in two directions; None for sizes.
        what: the numbers are.
    """
    rows = -(-min(len(blocks), 3 * MAX_ROWS) // 3)
    with drawing(0.85 + 1.42 * rows, squares=True) as figure:
        image, grid = _draw_blocks(figure, names, blocks, neutral, 3, rows)
        scale_below(figure, image, grid, what)
        return figure


def _draw_blocks(
    figure: Any, names: Sequence[str], blocks: NDArray[np.float64], neutral: float | None, columns: int, rows: int
) -> tuple[Any, Any]:
    """Panels of `blocks_figure`; gives an image for the scale, and the panels."""
    picked = spread(len(blocks), columns * rows)
    reach = float(np.abs(blocks - (neutral or 0.0)).max()) or 1.0
    bounds: dict[str, Any] = {"vmin": 0.0, "vmax": reach, "cmap": SEQUENTIAL}
    if neutral is not None:
        bounds = {"vmin": neutral - reach, "vmax": neutral + reach, "cmap": DIVERGING}
    grid = _panels(figure, rows, columns, len(picked))
    for axes, layer in zip(grid.ravel(), picked, strict=False):
        image = axes.imshow(blocks[layer], interpolation="none", **bounds)
        axes.set_title(short_name(names[layer]), fontsize=8)
        ticks(axes, blocks.shape[2], blocks.shape[1])
    _label(grid, "input block", "output block")
    return image, grid


def short_name(name: str) -> str:
    """`layers.0.mlp.up_proj` as `0 up_proj`."""
    parts = name.split(".")
    return f"{parts[1]} {parts[-1]}" if len(parts) > 2 else name


def neurons_moved(edit: FactorLlmEdit, start: FactorLlmEdit) -> NDArray[np.int64]:
    """Neurons of each expert of `edit` by the expert of `start` that they were in, int64 [layers, N, N]."""
    width = edit.width // edit.experts
    owner = np.argsort(start.order, axis=1) // width
    there = np.take_along_axis(owner, edit.order.astype(np.int64), axis=1).reshape(edit.layers, edit.experts, width)
    counts: NDArray[np.int64] = (there[..., None] == np.arange(edit.experts)).sum(axis=2)
    return counts


def division_figure(edit: FactorLlmEdit, start: FactorLlmEdit) -> Figure:
    """Where the neurons of a divided network's experts were at the start of the search."""
    rows = -(-min(edit.layers, 2 * MAX_ROWS) // 2)
    with drawing(0.85 + 2.0 * rows, squares=True) as figure:
        image, grid = _draw_division(figure, edit, start, 2, rows)
        scale_below(figure, image, grid, "neurons in common")
        return figure


def _draw_division(figure: Any, edit: FactorLlmEdit, start: FactorLlmEdit, columns: int, rows: int) -> tuple[Any, Any]:
    """Panels of `division_figure`; gives an image for the scale, and the panels."""
    moved = neurons_moved(edit, start)
    picked = spread(len(moved), columns * rows)
    grid = _panels(figure, rows, columns, len(picked))
    for axes, layer in zip(grid.ravel(), picked, strict=False):
        vmax = edit.width // edit.experts
        image = axes.imshow(moved[layer], cmap=SEQUENTIAL, vmin=0, vmax=vmax, interpolation="none")
        axes.set_title(f"layer {layer}", fontsize=8)
        ticks(axes, edit.experts, edit.experts)
    _label(grid, "expert at the start", "expert now")
    return image, grid


def widths_figure(edit: ToMoeEdit) -> Figure:
    """Neurons per layer: of one expert, of all experts together, and of the whole network."""
    with drawing(2.6) as figure:
        _draw_widths(figure, edit)
        figure.legend(loc="outside upper center", ncols=3, columnspacing=1.2, handlelength=1.6)
        return figure


def _draw_widths(figure: Any, edit: ToMoeEdit) -> None:
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


def draws(genome: Genome, start: Genome | None) -> bool:
    """Whether `draw_dense` has something to draw of a genome."""
    if isinstance(genome, NanoMoeGenome):
        return bool(genome.mixing.size)
    return isinstance(genome, ToMoeGenome) or (
        isinstance(genome, FactorLlmGenome) and isinstance(start, FactorLlmGenome)
    )


def draw_dense(figure: Any, genome: Genome, start: Genome | None, label: str) -> None:
    """What was searched of a dense model, on a wide part of a figure.

    Args:
        figure: a figure or a part of one.
        genome: of a dense model; one that `draws` has said yes to.
        start: the genome that the search started from.
        label: how to name it.
    """
    if isinstance(genome, NanoMoeGenome):
        names, blocks, neutral, what = _mixing(genome)
        figure.suptitle(f"mixing matrices of {label}", fontsize="medium")
        columns = min(len(blocks), _WIDE)
        image, grid = _draw_blocks(figure, names, blocks, neutral, columns, min(2, -(-len(blocks) // columns)))
        figure.colorbar(image, ax=grid.ravel().tolist(), shrink=0.8, label=what)
    elif isinstance(genome, ToMoeGenome):
        figure.suptitle(f"widths of {label}", fontsize="medium")
        _draw_widths(figure, genome.express())
        figure.legend(loc="outside right upper")
    elif isinstance(genome, FactorLlmGenome) and isinstance(start, FactorLlmGenome):
        edit = genome.express()
        figure.suptitle(f"division of {label}", fontsize="medium")
        columns = min(edit.layers, _WIDE)
        rows = min(2, -(-edit.layers // columns))
        image, grid = _draw_division(figure, edit, start.express(), columns, rows)
        figure.colorbar(image, ax=grid.ravel().tolist(), shrink=0.8, label="neurons in common")


def _panels(figure: Any, rows: int, columns: int, used: int) -> Any:
    """Panels side by side, those beyond `used` left blank."""
    grid = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True)
    for axes in grid.ravel()[used:]:
        axes.set_axis_off()
    return grid


def _label(grid: Any, x: str, y: str) -> None:
    for axes in grid[:, 0]:
        axes.set_ylabel(y)
    for axes in grid[-1]:
        axes.set_xlabel(x)
