"""Numbers as people read them: scores, sizes and times in tables, pages and reports."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from itertools import groupby
from typing import Protocol

from moevolve.evaluators.scales import SCALES, ScaleName


class Measured(Protocol):
    """A score with its interval and its spread, each in [0, 1]; None where it isn't known; and how they are shown."""

    @property
    def score(self) -> float | None: ...
    @property
    def low(self) -> float | None: ...
    @property
    def high(self) -> float | None: ...
    @property
    def spread(self) -> float | None: ...
    @property
    def scale(self) -> ScaleName: ...


def percent(value: float | None) -> str:
    """Format a share in [0, 1] in % with one decimal, or `-` for None."""
    return "-" if value is None else f"{100 * value:.1f}"


def quantity(text: str, units: Mapping[str, float]) -> float | None:
    """Read a number above 0 with a unit, such as `1.5 GiB`; None if it isn't one.

    Args:
        text: The text.
        units: Values of the units by their names.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]+)\s*", text)
    factor = None if found is None else units.get(found[2])
    return None if found is None or factor is None else float(found[1]) * factor or None


def score_lines(found: Measured) -> list[str]:
    """Format a table cell: the score, then its spread and its interval as far as they are known."""
    if found.score is None:
        return ["failed"]
    scale = SCALES[found.scale]
    lines = [scale.text(found.score)]
    if found.spread is not None:
        lines.append(f"+- {scale.spread(found.score, found.spread)}")
    if found.low is not None and found.high is not None:
        lines.append(scale.interval(found.low, found.high))
    return lines


def parameter_count(parameters: int | None) -> str:
    """Format a number of parameters in millions (M) or billions (B), or `-` for None."""
    if parameters is None:
        return "-"
    return f"{parameters / 1e9:.2f} B" if parameters >= 1e9 else f"{parameters / 1e6:.2f} M"


def flop_count(flops: float) -> str:
    """Format a number of FLOPs with the prefix M, G, T or P."""
    for unit, name in ((1e15, "P"), (1e12, "T"), (1e9, "G")):
        if flops >= unit:
            return f"{flops / unit:,.2f} {name}"
    return f"{flops / 1e6:,.2f} M"


def size_lines(parameters: int | None, full: int | None) -> list[str]:
    """Format a table cell: a number of parameters, and its share of the full model's."""
    if parameters is None or not full:
        return ["-"]
    return [parameter_count(parameters), f"{100 * parameters / full:.0f} %"]


def memory_size(size: int | None) -> str:
    """Format a number of bytes in MiB or GiB, or `-` for None and 0."""
    if not size:
        return "-"
    return f"{size / 2**30:,.1f} GiB" if size >= 2**30 else f"{size / 2**20:,.1f} MiB"


def duration(hours: float) -> str:
    """Format a time in hours, minutes or seconds, to two digits."""
    if hours >= 1:
        return f"{hours:,.0f} hours" if hours >= 9.95 else f"{hours:.1f} hours"
    return f"{60 * hours:.0f} minutes" if hours >= 1 / 30 else f"{3600 * hours:.0f} seconds"


def ranges(numbers: Iterable[int]) -> str:
    """Format numbers as `0-3, 7`, or as `none`."""
    found = []
    # Consecutive numbers are equally far from their places in the order.
    for _, run in groupby(enumerate(sorted(numbers)), key=lambda placed: placed[1] - placed[0]):
        first, *others = (number for _, number in run)
        found.append(f"{first}-{others[-1]}" if others else str(first))
    return ", ".join(found) or "none"
