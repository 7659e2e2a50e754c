"""What functions that search show while they run: lines on stderr, or a text in a notebook."""

from __future__ import annotations

import inspect
import sys
import time
from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar

from moevolve.search.interface.progress import line_observer, progress_line
from moevolve.search.interface.tables import plain
from moevolve.search.running.observer import Observer

if TYPE_CHECKING:
    from moevolve.search.config.study import StudyCell
    from moevolve.store.records import Progress

F = TypeVar("F", bound=Callable[..., Any])

_PAUSE_S = 0.2
"""Shortest time between two replacements of a text; browsers gain nothing from more."""
_ABOUT = "    progress: Show steps and scores on stderr, or in the notebook; an observer replaces that."


def progress_of(name: str = "") -> Observer:
    """Make the observer that shows a search's progress where this process is used; lines begin with `name`."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    if not hasattr(shell, "kernel"):  # IPython in a terminal has none
        return line_observer(_print_line, name)
    cell = _Cell(name)
    return Observer(on_note=cell.add, on_stage=cell.add, on_progress=cell.replace)


def progress_of_study() -> Callable[[int, StudyCell], Observer]:
    """Make the function that makes the observer of a study's search."""
    return lambda place, cell: progress_of(f"[{place + 1}] {cell.config.name}")


def shown(function: F, make: Callable[[], Any]) -> F:
    """Have a function show its progress unless it gets an observer or `progress=False`.

    Args:
        function: Takes `observer`.
        make: Makes what it takes.
    """

    @wraps(function)
    def call(*args: Any, progress: bool = True, **kwargs: Any) -> Any:
        if progress and "observer" not in kwargs:
            kwargs["observer"] = make()
        return function(*args, **kwargs)

    signature = inspect.signature(function)
    switch = inspect.Parameter("progress", inspect.Parameter.KEYWORD_ONLY, default=True, annotation="bool")
    call.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=[*signature.parameters.values(), switch]
    )
    head, raises, errors = (function.__doc__ or "").partition("\n\nRaises:")
    call.__doc__ = f"{head}\n{_ABOUT}{raises}{errors}"
    same: Any = call
    return same


def _print_line(line: str) -> None:
    print(plain(line), file=sys.stderr, flush=True)  # noqa: T201 - what it is for


class _Cell:
    """A text of a notebook that is replaced as it grows; stderr would be on red there."""

    def __init__(self, name: str) -> None:
        self._lines = [name] if name else []
        self._state = ""
        self._handle: Any = None
        self._replaced = -_PAUSE_S

    def add(self, line: str) -> None:
        self._lines += [self._state, line] if self._state else [line]
        self._state = ""
        self._show()

    def replace(self, progress: Progress) -> None:
        self._state = progress_line(progress)
        if time.monotonic() - self._replaced >= _PAUSE_S:
            self._replaced = time.monotonic()
            self._show()

    def _show(self) -> None:
        from IPython.display import display

        text = plain("\n".join([*self._lines, self._state]).rstrip())
        if self._handle is None:
            self._handle = display({"text/plain": text}, raw=True, display_id=True)
        else:
            self._handle.update({"text/plain": text}, raw=True)
