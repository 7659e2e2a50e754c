"""Heat maps in panels: their number and labels, and a figure of the blocks of linear layers' matrices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from moevolve.search.report.style import DIVERGING, SEQUENTIAL, drawing, scale_below

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_ROWS = 6
"""Most rows of panels in a figure for a narrow page."""
WIDE = 6
"""Panels in a row on a wide page."""


def spread(count: int, limit: int) -> NDArray[np.int64]:
    """Choose at most `limit` of `count` positions evenly, the first and the last among them."""
    positions: NDArray[np.int64] = np.unique(np.linspace(0, count - 1, min(count, limit)).round().astype(np.int64))
    return positions


def left_out(count: int, shown: int, what: str) -> str:
    """Make a caption's sentence on how many of `count` are shown, or an empty string if all are."""
    return "" if count <= shown else f" {shown} of {count} {what} are shown."


def ticks(axes: Axes, columns: int, rows: int) -> None:
    """Put at most eight labels on either axis of a heat map."""
    axes.set_xticks(range(0, columns, -(-columns // 8)))
    axes.set_yticks(range(0, rows, -(-rows // 8)))


def panels(figure: Any, rows: int, columns: int, used: int) -> Any:
    """Make a grid of panels, of which those beyond `used` stay blank."""
    grid = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True)
    for axes in grid.ravel()[used:]:
        axes.set_axis_off()
    return grid


def label_edges(grid: Any, x: str, y: str) -> None:
    """Label the axes at the left and at the lower edge of a grid of panels."""
    for axes in grid[:, 0]:
        axes.set_ylabel(y)
    for axes in grid[-1]:
        axes.set_xlabel(x)


def short_name(name: str) -> str:
    """Shorten a layer's name, `layers.0.mlp.up_proj`, to `0 up_proj`."""
    parts = name.split(".")
    return f"{parts[1]} {parts[-1]}" if len(parts) > 2 else name


def blocks_figure(names: Sequence[str], blocks: NDArray[np.float64], neutral: float | None, what: str) -> Figure:
    """Draw one number per block of linear layers' mixing matrices.

    Args:
        names: Names of the layers.
        blocks: Numbers to draw, shape (layers, K, K).
        neutral: Value in the middle of a two-sided colour scale; None for numbers from 0 on.
        what: Label of the colour scale.
    """
    rows = -(-min(len(blocks), 3 * MAX_ROWS) // 3)
    with drawing(0.85 + 1.42 * rows, squares=True) as figure:
        image, grid = draw_blocks(figure, names, blocks, neutral, 3, rows)
        scale_below(figure, image, grid, what)
        return figure


def draw_blocks(
    figure: Any, names: Sequence[str], blocks: NDArray[np.float64], neutral: float | None, columns: int, rows: int
) -> tuple[Any, Any]:
    """Draw the panels of `blocks_figure`; return an image for the colour scale, and the panels."""
    picked = spread(len(blocks), columns * rows)
    reach = float(np.abs(blocks - (neutral or 0.0)).max()) or 1.0
    bounds: dict[str, Any] = {"vmin": 0.0, "vmax": reach, "cmap": SEQUENTIAL}
    if neutral is not None:
        bounds = {"vmin": neutral - reach, "vmax": neutral + reach, "cmap": DIVERGING}
    grid = panels(figure, rows, columns, len(picked))
    for axes, layer in zip(grid.ravel(), picked, strict=False):
        image = axes.imshow(blocks[layer], interpolation="none", **bounds)
        axes.set_title(short_name(names[layer]), fontsize=8)
        ticks(axes, blocks.shape[2], blocks.shape[1])
    label_edges(grid, "input block", "output block")
    return image, grid
