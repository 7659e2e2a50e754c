"""Shows the progress of a search."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

import moevolve
from moevolve.search.cli.output.console import errors
from moevolve.search.interface.progress import describe, line_observer
from moevolve.search.text import plain

if TYPE_CHECKING:
    from moevolve import Observer
    from moevolve import Progress as SearchProgress


def print_line(line: str) -> None:
    """Print a line of any length on stderr."""
    errors.print(line, soft_wrap=True)


@contextmanager
def watch(name: str) -> Iterator[Observer]:
    """Make an observer that draws a bar on a terminal, or prints a line now and then elsewhere."""
    if not errors.is_terminal:
        yield line_observer(print_line, name)
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
