"""How figures are drawn: their style, heat maps in panels, and saving them as files or as SVG for a page."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from html import escape
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from moevolve.evaluators.errors import UserError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.cm import ScalarMappable as ScalarMappable  # noqa: PLC0414

    # Other packages import these types from here.
    from matplotlib.figure import Figure as Figure  # noqa: PLC0414
    from matplotlib.figure import SubFigure
    from matplotlib.typing import RcKeyType

    AnyFigure = Figure | SubFigure
    Panels = NDArray[np.object_]  # of axes, by row and column

# Width of a figure in inches: at a phone's width, its letters are as large as the text around it.
WIDTH = 4.1
# Dots per inch of pictures, and of raster images within an SVG.
DPI = 200
# Colour of text and axes. On a page they take the page's text colour instead, for light and dark themes.
INK = "#0b0c0d"

# Okabe-Ito: distinguishable with any colour vision.
BLUE, ORANGE, GREEN, PURPLE, RED = "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00"
PHASE_COLOURS = (BLUE, ORANGE, GREEN, PURPLE)
# Most dots or lines that an SVG holds one by one; more of them become a raster image within it.
MANY_MARKS = 3000
GREY = "#8a8a8a"
DIVERGING = "RdBu_r"
# Most rows of panels in a figure for a narrow page.
MAX_ROWS = 6

_STYLE: dict[RcKeyType, object] = {
    "font.size": 9.0,
    "axes.titlesize": 9.0,
    "axes.labelsize": 9.0,
    "xtick.labelsize": 8.0,
    "ytick.labelsize": 8.0,
    "legend.fontsize": 8.0,
    "legend.frameon": False,
    "text.parse_math": False,  # names and words may have dollar signs
    "text.color": INK,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.facecolor": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "figure.constrained_layout.h_pad": 0.05,
}


@contextmanager
def drawing(height: float, width: float = WIDTH) -> Iterator[Figure]:
    """Make a figure of `width` x `height` inches in our style."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(_STYLE):
        yield Figure(figsize=(width, height), layout="constrained")


def scale_below(figure: AnyFigure, image: ScalarMappable, panels: Panels, label: str) -> None:
    """Put a colour scale under all panels of a figure, equally high in figures of any height."""
    height = figure.bbox.height / figure.dpi
    figure.colorbar(
        image,
        ax=panels.ravel().tolist(),
        location="bottom",
        shrink=0.8,
        fraction=0.15 / height,
        pad=0.08 / height,
        aspect=30,
        label=label,
    )


def save(figure: Figure, path: Path) -> None:
    """Write a figure in the format of the file's suffix.

    Raises:
        UserError: the file can't be written.
    """
    try:
        figure.savefig(path, dpi=DPI)
    except OSError as error:
        raise UserError(f"{path}: can't be written: {error.strerror or error}") from error


def check_format(path: Path) -> None:
    """Raise UserError if figures can't be written in the format of a file's suffix."""
    from matplotlib.backend_bases import FigureCanvasBase

    formats = FigureCanvasBase.get_supported_filetypes()
    if path.suffix.lstrip(".").lower() not in formats:
        known = ", ".join(sorted(formats))
        raise UserError(f"{path}: unknown picture format; use one of {known}")


def to_svg(figure: Figure, name: str, description: str) -> str:
    """Make an `<svg>` element for a page: it refers to nothing outside and takes the text's colour.

    Args:
        figure: Figure to convert.
        name: Prefix that distinguishes its ids from other figures' on the page; letters and digits.
        description: Description of the figure for screen readers.
    """
    from matplotlib import rc_context

    buffer = StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        figure.savefig(buffer, format="svg", dpi=DPI, facecolor="none", metadata={"Date": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", text, flags=re.DOTALL)
    # Equal images get equal ids, which nothing refers to.
    text = re.sub(r'(<image [^>]*?) id="[^"]*"', r"\1", text)
    text = re.sub(r'\bid="', f'id="{name}-', text)
    text = re.sub(r"url\(#", f"url(#{name}-", text)
    text = re.sub(r'(xlink:href|href)="#', rf'\1="#{name}-', text)
    text = text.replace(INK, "currentColor").replace(BLUE.lower(), f"var(--figure-blue, {BLUE})")
    opening, rest = text.split(">", 1)
    # The page chooses the size; the view box keeps the shape.
    opening = re.sub(r'\s(width|height|version)="[^"]*"', "", opening)
    return f'{opening} role="img" aria-label="{escape(description, quote=True)}">{rest.strip()}'


def spread(count: int, limit: int) -> NDArray[np.int64]:
    """Choose at most `limit` of `count` positions evenly, the first and the last among them."""
    return np.unique(np.linspace(0, count - 1, min(count, limit)).round().astype(np.int64))


def shown_note(count: int, shown: int, what: str) -> str:
    """Make a caption's sentence on how many of `count` are shown, or an empty string if all are."""
    return "" if count <= shown else f" {shown} of {count} {what} are shown."


def ticks(axes: Axes, columns: int, rows: int) -> None:
    """Put at most eight labels on either axis of a heat map."""
    axes.set_xticks(range(0, columns, -(-columns // 8)))
    axes.set_yticks(range(0, rows, -(-rows // 8)))
