"""The progress of a search as lines of text."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from moevolve.evaluators.scales import SCALES
from moevolve.search.running.observer import Observer
from moevolve.search.text import duration

if TYPE_CHECKING:
    from moevolve.store.records import Progress

# Number of lines on the evaluations of a search, in a log that is read afterwards.
_LINES = 10


def line_observer(write: Callable[[str], object], name: str = "", lines: int = _LINES) -> Observer:
    """Make an observer that writes each stage, and `lines` lines over a whole search, which a pilot may come before.

    Args:
        write: Takes a line.
        name: Beginning of every line.
    """
    following = 0
    head = f"{name}: " if name else ""

    def on_line(line: str) -> None:
        write(f"{head}{line}")

    def on_stage(stage: str) -> None:
        nonlocal following
        following = 0
        on_line(stage)

    def on_progress(progress: Progress) -> None:
        nonlocal following
        part = progress.done * lines // progress.total
        if part >= following and progress.full is not None:
            on_line(f"{progress.phase} {progress.done}/{progress.total} {describe(progress)}")
            following = part + 1

    return Observer(on_note=on_line, on_stage=on_stage, on_progress=on_progress)


def describe(progress: Progress) -> str:
    """Summarise the best and the full model's scores, speed, and remaining time in one line."""
    parts, scale = [], SCALES[progress.scale]
    if progress.best is not None:
        parts.append(f"best {scale.text(progress.best[1])} (#{progress.best[0]})")
    if progress.full is not None:
        parts.append(f"full {scale.text(progress.full)}")
    if progress.rate is not None:
        parts.append(f"{progress.rate:.2f} evaluations/s")
    if progress.left is not None:
        parts.append(f"{duration(progress.left)} left")
    if progress.failed:
        parts.append(f"{progress.failed} failed")
    return ", ".join(parts)
