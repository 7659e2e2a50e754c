"""Shows the progress of a search."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING

from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

import moevolve
from moevolve.evaluators.scales import SCALES
from moevolve.search.cli.output.console import errors
from moevolve.search.interface.tables import plain

if TYPE_CHECKING:
    from moevolve import Observer
    from moevolve import Progress as SearchProgress

_LINES = 10
"""Number of progress lines per search where stderr isn't a terminal."""


@contextmanager
def watch(name: str) -> Iterator[Observer]:
    """Make an observer that draws a bar on a terminal, or prints a line now and then elsewhere."""
    if not errors.is_terminal:
        yield line_observer(name)
        return
    columns = (
        SpinnerColumn(),
        TextColumn("{task.fields[phase]}", style="bold", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[state]}", markup=False),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=errors, transient=True) as bar:
        task = bar.add_task(name, total=None, phase="starting", state="")

        def on_stage(stage: str) -> None:
            bar.update(task, phase=plain(stage), state="")

        def on_progress(progress: SearchProgress) -> None:
            phase, state = plain(progress.phase), describe(progress)
            bar.update(task, completed=progress.done, total=progress.total, phase=phase, state=state)

        yield moevolve.Observer(on_stage=on_stage, on_progress=on_progress)


def line_observer(name: str, lines: int = _LINES) -> Observer:
    """Make an observer that prints each stage, and `lines` lines over a whole search, which a pilot may come before."""
    following = 0

    def print_line(line: str) -> None:
        errors.print(f"{name}: {line}", soft_wrap=True)

    def on_stage(stage: str) -> None:
        nonlocal following
        following = 0
        print_line(stage)

    def on_progress(progress: SearchProgress) -> None:
        nonlocal following
        part = progress.done * lines // progress.total
        if part >= following and progress.full is not None:
            print_line(f"{progress.phase} {progress.done}/{progress.total} {describe(progress)}")
            following = part + 1

    return moevolve.Observer(on_note=print_line, on_stage=on_stage, on_progress=on_progress)


def describe(progress: SearchProgress) -> str:
    """Summarise the best and the full model's scores, speed, and remaining time in one line."""
    parts, scale = [], SCALES[progress.scale]
    if progress.best is not None:
        parts.append(f"best {scale.text(progress.best[1])} (#{progress.best[0]})")
    if progress.full is not None:
        parts.append(f"full {scale.text(progress.full)}")
    if progress.rate is not None and progress.left is not None:
        parts.append(f"{progress.rate:.2f} evaluations/s")
        parts.append(f"{timedelta(seconds=round(progress.left))} left")
    if progress.failed:
        parts.append(f"{progress.failed} failed")
    return ", ".join(parts)
