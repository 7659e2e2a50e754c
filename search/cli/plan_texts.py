"""A plan's numbers as people read them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from moevolve.search.planning.estimate import Range


def span_text(found: Range, text: Callable[[float], str]) -> str:
    least, most = text(found.least), text(found.most)
    return least if least == most else f"{least} - {most}"


def seconds_text(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:,.0f}"


def rate_text(value: float) -> str:
    return f"{value:.3f}" if value < 1 else f"{value:.1f}"


def hours_text(value: float) -> str:
    return f"{value:.2f}" if value < 1 else f"{value:,.1f}"


def bytes_text(size: int) -> str:
    if not size:
        return "-"
    return f"{size / 2**30:,.1f} GiB" if size >= 2**30 else f"{size / 2**20:,.1f} MiB"


def operations_text(flops: float) -> str:
    for unit, name in ((1e15, "P"), (1e12, "T"), (1e9, "G")):
        if flops >= unit:
            return f"{flops / unit:,.2f} {name}"
    return f"{flops / 1e6:,.2f} M"
