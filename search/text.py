"""Numbers as people read them: what tables, pages and reports show of scores and sizes."""

from __future__ import annotations

from typing import Protocol

_MANY_MEBIBYTES = 10_000


class Measured(Protocol):
    """A score with what is known of its spread, each in [0, 1]; None where it isn't known."""

    @property
    def score(self) -> float | None: ...
    @property
    def low(self) -> float | None: ...
    @property
    def high(self) -> float | None: ...
    @property
    def spread(self) -> float | None: ...


def percent(value: float | None) -> str:
    """A score in [0, 1], in % with one decimal; `-` for none."""
    return "-" if value is None else f"{100 * value:.1f}"


def score_lines(found: Measured) -> list[str]:
    """A table's cell: the score in %, then its spread and its interval as far as they are known."""
    if found.score is None:
        return ["failed"]
    lines = [percent(found.score)]
    if found.spread is not None:
        lines.append(f"+- {percent(found.spread)}")
    if found.low is not None and found.high is not None:
        lines.append(f"{percent(found.low)} - {percent(found.high)}")
    return lines


def parameter_count(parameters: int | None) -> str:
    """A number of parameters in millions (M) or billions (B); `-` for none."""
    if parameters is None:
        return "-"
    return f"{parameters / 1e9:.2f} B" if parameters >= 1e9 else f"{parameters / 1e6:.2f} M"


def size_lines(parameters: int | None, full: int | None) -> list[str]:
    """A table's cell: a number of parameters, and its share of the full model's."""
    if parameters is None or not full:
        return ["-"]
    return [parameter_count(parameters), f"{100 * parameters / full:.0f} %"]


def memory_size(size: int | None) -> str:
    """Bytes in MiB or GiB; `-` for none."""
    if size is None:
        return "-"
    mebibytes = size / 2**20
    return f"{mebibytes:,.0f} MiB" if mebibytes < _MANY_MEBIBYTES else f"{mebibytes / 2**10:,.1f} GiB"
