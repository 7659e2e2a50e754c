"""EEP's matrices as heat maps (paper: Fig. 8)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from moevolve.search.figures.style import DIVERGING, drawing, scale_below
from moevolve.search.genomes.eep.genome import EepGenome

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MAX_GROUPS = 8
MAX_ROWS = 6
"""Rows of panels in a figure for a narrow page."""


def spread(count: int, limit: int) -> NDArray[np.int64]:
    """At most `limit` of `count` positions, the first and the last among them."""
    positions: NDArray[np.int64] = np.unique(np.linspace(0, count - 1, min(count, limit)).round().astype(np.int64))
    return positions


def draw_eep_matrices(figure: Any, genome: EepGenome, label: str) -> None:
    """Router mapping above, expert merging below, one column per group of layers (paper: Fig. 8).

    Args:
        figure: a figure or a part of one.
        genome: whose matrices.
        label: how to name it.
    """
    mapping, merging = genome.canonical
    picked = spread(genome.space.groups, _MAX_GROUPS)
    left_out = f" ({len(picked)} of {genome.space.groups} groups)" if len(picked) < genome.space.groups else ""
    figure.suptitle(f"matrices of {label}{left_out}", fontsize="medium")
    grid = figure.subplots(2, len(picked), squeeze=False, sharex=True, sharey=True)
    for row, (matrices, name) in enumerate(((mapping, "router mapping"), (merging, "expert merging"))):
        grid[row, 0].set_ylabel(f"{name}\nnew expert", fontsize="small")
        for axes, group in zip(grid[row], picked, strict=True):
            image = _coefficients(axes, matrices[group], _limit(mapping, merging))
    for axes, group in zip(grid[0], picked, strict=True):
        axes.set_title(_layers_of(genome, int(group)), fontsize="small")
    for axes in grid[1]:
        axes.set_xlabel("original expert", fontsize="small")
        ticks(axes, genome.space.experts, genome.space.retained)
    figure.colorbar(image, ax=grid.ravel().tolist(), shrink=0.8, label="coefficient")


def eep_figure(genome: EepGenome) -> Figure:
    """The same for a narrow page: one row per group of layers, router mapping to the left of expert merging."""
    mapping, merging = genome.canonical
    picked = spread(genome.space.groups, MAX_ROWS)
    share = min(1.0, genome.space.retained / genome.space.experts)
    with drawing(0.9 + len(picked) * (0.55 + 1.55 * share)) as figure:
        grid = figure.subplots(len(picked), 2, squeeze=False, sharex=True, sharey=True)
        for row, group in zip(grid, picked, strict=True):
            for axes, matrices in zip(row, (mapping, merging), strict=True):
                image = _coefficients(axes, matrices[group], _limit(mapping, merging))
                ticks(axes, genome.space.experts, genome.space.retained)
            row[0].set_ylabel(f"{_layers_of(genome, int(group))}\nnew expert")
        for axes, name in zip(grid[0], ("router mapping", "expert merging"), strict=True):
            axes.set_title(name)
        for axes in grid[-1]:
            axes.set_xlabel("original expert")
        scale_below(figure, image, grid, "coefficient")
        return figure


def _coefficients(axes: Axes, matrix: NDArray[Any], limit: float) -> Any:
    return axes.imshow(matrix, cmap=DIVERGING, vmin=-limit, vmax=limit, aspect="auto", interpolation="none")


def _limit(*arrays: NDArray[Any]) -> float:
    """Of the scale, the same on both sides of zero."""
    return float(max(1.0, *(np.abs(array).max() for array in arrays)))


def ticks(axes: Axes, columns: int, rows: int) -> None:
    """At most eight labels on either axis of a heat map."""
    axes.set_xticks(range(0, columns, -(-columns // 8)))
    axes.set_yticks(range(0, rows, -(-rows // 8)))


def _layers_of(genome: EepGenome, group: int) -> str:
    """The decoder layers of a group."""
    layers = genome.space.facts.moe_layers
    members = [layer for layer, owner in zip(layers, genome.space.layer_groups, strict=True) if owner == group]
    return f"layer {members[0]}" if len(members) == 1 else f"layers {members[0]}-{members[-1]}"
