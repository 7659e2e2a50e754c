"""Figures as documents of their own, which pages show as images: drawn when they are looked at, and not before."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from fastapi import Response

from moevolve.search.figures.style import to_svg
from moevolve.search.server.guard import DOCUMENT_POLICY

if TYPE_CHECKING:
    from moevolve.search.figures.style import Figure

_COLOURS = (
    "<style>svg { color: #16191d; --figure-blue: #0072b2; } @media (prefers-color-scheme: dark) "
    "{ svg { color: #e7eaee; --figure-blue: #56b4e9; } }</style>"
)
_drawing = threading.Lock()
"""Matplotlib's settings, which figures are drawn under, are those of the process."""


def svg_document(draw: Callable[[], Figure], description: str) -> Response:
    """A figure that takes the colours of the reader's light or dark screen.

    Args:
        draw: makes it.
        description: what is to be seen, for those who can't see it.
    """
    with _drawing:
        text = to_svg(draw(), "figure", description)
    opening, rest = text.split(">", 1)
    return Response(
        f"{opening}>{_COLOURS}{rest}",
        media_type="image/svg+xml",
        headers={"content-security-policy": DOCUMENT_POLICY},
    )
