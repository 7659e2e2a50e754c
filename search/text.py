"""Numbers as people read them: scores, sizes and times in tables, pages and reports; and texts safe to print."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from datetime import datetime, timedelta
from itertools import groupby
from typing import Protocol

from moevolve.evaluators.scales import SCALES, ScaleName

_CONTROLS = {code: "\N{REPLACEMENT CHARACTER}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


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
    found = re.fullmatch(r"\s*(\d{1,18}(?:\.\d+)?)\s*([A-Za-z]+)\s*", text)
    factor = None if found is None else units.get(found[2])
    return None if found is None or factor is None else float(found[1]) * factor or None


def score_lines(found: Measured) -> list[str]:
    """Format a table cell: the score, then its spread and its interval if known."""
    if found.score is None:
        return ["failed"]
    scale = SCALES[found.scale]
    lines = [scale.text(found.score)]
    if found.spread is not None:
        lines.append(f"+- {scale.spread(found.score, found.spread)}")
    if found.low is not None and found.high is not None:
        lines.append(scale.interval(found.low, found.high))
    return lines


def score_phrase(found: Measured) -> str:
    """Format a score with its unit, and its spread and its interval in parentheses."""
    if found.score is None:
        return "failed"
    phrase, more = SCALES[found.scale].phrase(found.score), ", ".join(score_lines(found)[1:])
    return f"{phrase} ({more})" if more else phrase


def parameter_count(parameters: int | None) -> str:
    """Format a number of parameters in millions (M) or billions (B), or `-` for None."""
    if parameters is None:
        return "-"
    return f"{parameters / 1e9:.2f} B" if parameters >= 1e9 else f"{parameters / 1e6:.2f} M"


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


def clock(seconds: float) -> str:
    """Format the local time of day in so many seconds."""
    return (datetime.now() + timedelta(seconds=seconds)).strftime("%H:%M:%S")  # noqa: DTZ005 - as users' clocks say


def duration(seconds: float) -> str:
    """Format a time in seconds, minutes or hours."""
    if seconds < 120:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:,.1f} h"


def date_time(moment: datetime | None) -> str:
    """Format a moment, or `-` for None."""
    return "-" if moment is None else f"{moment:%Y-%m-%d %H:%M}"


def ranges(numbers: Iterable[int]) -> str:
    """Format numbers as `0-3, 7`, or as `none`."""
    found = []
    # Consecutive numbers are equally far from their places in the order.
    for _, run in groupby(enumerate(sorted(numbers)), key=lambda placed: placed[1] - placed[0]):
        first, *others = (number for _, number in run)
        found.append(f"{first}-{others[-1]}" if others else str(first))
    return ", ".join(found) or "none"


def plain(text: str) -> str:
    """Replace control characters, which could move a terminal's cursor or send it commands."""
    return text.translate(_CONTROLS)
