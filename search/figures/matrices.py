"""What was searched, as heat maps: EEP's matrices (paper: Fig. 8) and what stands in their place in other kinds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from moevolve.search.figures.style import BLUE, DIVERGING, GREEN, GREY, SEQUENTIAL, drawing, scale_below
from moevolve.search.genomes.eep_genome import EepGenome
from moevolve.search.genomes.nanomoe import NanoMoeGenome
from moevolve.workers.edits.factorllm import FactorLlmEdit
from moevolve.workers.edits.tomoe import ToMoeEdit

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
        _ticks(axes, genome.space.experts, genome.space.retained)
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
                _ticks(axes, genome.space.experts, genome.space.retained)
            row[0].set_ylabel(f"{_layers_of(genome, int(group))}\nnew expert")
        for axes, name in zip(grid[0], ("router mapping", "expert merging"), strict=True):
            axes.set_title(name)
        for axes in grid[-1]:
            axes.set_xlabel("original expert")
        scale_below(figure, image, grid, "coefficient")
        return figure


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
    names = [layer.name for layer in genome.space.layers]
    if genome.space.form.variant == "I":
        return blocks_figure(names, mixing_change(genome), 0.0, "change of the mixing coefficient")
    return blocks_figure(names, mixing_change(genome), None, "root mean square change of the block")


def blocks_figure(names: Sequence[str], blocks: NDArray[np.float64], neutral: float | None, what: str) -> Figure:
    """One number per block of linear layers' mixing matrices.

    Args:
        names: of the layers.
        blocks: [layers, K, K].
        neutral: the value in the middle of the scale, from which numbers differ in two directions; None for sizes.
        what: the numbers are.
    """
    picked = spread(len(blocks), 3 * MAX_ROWS)
    rows = -(-len(picked) // 3)
    reach = float(np.abs(blocks - (neutral or 0.0)).max()) or 1.0
    bounds: dict[str, Any] = {"vmin": 0.0, "vmax": reach, "cmap": SEQUENTIAL}
    if neutral is not None:
        bounds = {"vmin": neutral - reach, "vmax": neutral + reach, "cmap": DIVERGING}
    with drawing(0.85 + 1.42 * rows, squares=True) as figure:
        grid = figure.subplots(rows, 3, squeeze=False, sharex=True, sharey=True)
        for axes in grid.ravel()[len(picked) :]:
            axes.set_axis_off()
        for axes, layer in zip(grid.ravel(), picked, strict=False):
            image = axes.imshow(blocks[layer], interpolation="none", **bounds)
            axes.set_title(short_name(names[layer]), fontsize=8)
            _ticks(axes, blocks.shape[2], blocks.shape[1])
        for axes in grid[:, 0]:
            axes.set_ylabel("output block")
        for axes in grid[-1]:
            axes.set_xlabel("input block")
        scale_below(figure, image, grid, what)
        return figure


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
    moved = neurons_moved(edit, start)
    picked = spread(len(moved), 2 * MAX_ROWS)
    rows = -(-len(picked) // 2)
    with drawing(0.85 + 2.0 * rows, squares=True) as figure:
        grid = figure.subplots(rows, 2, squeeze=False, sharex=True, sharey=True)
        for axes in grid.ravel()[len(picked) :]:
            axes.set_axis_off()
        for axes, layer in zip(grid.ravel(), picked, strict=False):
            vmax = edit.width // edit.experts
            image = axes.imshow(moved[layer], cmap=SEQUENTIAL, vmin=0, vmax=vmax, interpolation="none")
            axes.set_title(f"layer {layer}")
            _ticks(axes, edit.experts, edit.experts)
        for axes in grid[:, 0]:
            axes.set_ylabel("expert now")
        for axes in grid[-1]:
            axes.set_xlabel("expert at the start")
        scale_below(figure, image, grid, "neurons in common")
        return figure


def widths_figure(edit: ToMoeEdit) -> Figure:
    """Neurons per layer: of one expert, of all experts together, and of the whole network."""
    layers = np.arange(edit.layers)
    unions = edit.kept.any(axis=1).sum(axis=1)
    with drawing(2.6) as figure:
        axes = figure.subplots()
        axes.bar(layers, unions, width=0.75, color=GREEN, alpha=0.45, label="any expert (union)")
        axes.bar(layers, edit.widths, width=0.5, color=BLUE, label="one expert (width)")
        axes.axhline(edit.width, color=GREY, linestyle="--", linewidth=1.2, label="whole network")
        axes.set_xlabel("layer")
        axes.set_ylabel("neurons")
        axes.set_xticks(spread(edit.layers, 12))
        axes.set_ylim(0, edit.width * 1.05)
        figure.legend(loc="outside upper center", ncols=3, columnspacing=1.2, handlelength=1.6)
        return figure


def _coefficients(axes: Axes, matrix: NDArray[Any], limit: float) -> Any:
    return axes.imshow(matrix, cmap=DIVERGING, vmin=-limit, vmax=limit, aspect="auto", interpolation="none")


def _limit(*arrays: NDArray[Any]) -> float:
    """Of the scale, the same on both sides of zero."""
    return float(max(1.0, *(np.abs(array).max() for array in arrays)))


def _ticks(axes: Axes, columns: int, rows: int) -> None:
    axes.set_xticks(range(0, columns, -(-columns // 8)))
    axes.set_yticks(range(0, rows, -(-rows // 8)))


def _layers_of(genome: EepGenome, group: int) -> str:
    """The decoder layers of a group."""
    layers = genome.space.facts.moe_layers
    members = [layer for layer, owner in zip(layers, genome.space.layer_groups, strict=True) if owner == group]
    return f"layer {members[0]}" if len(members) == 1 else f"layers {members[0]}-{members[-1]}"
