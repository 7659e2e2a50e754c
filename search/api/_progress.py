"""What functions show while they run: lines on stderr, or a text in a notebook."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any

from moevolve.search.interface.progress import line_observer, progress_line
from moevolve.search.interface.tables import plain
from moevolve.search.running.observer import Observer

if TYPE_CHECKING:
    from moevolve.store.records import Progress

# Shortest time between two replacements of a text; browsers gain nothing from more.
_PAUSE_S = 0.2


def progress_of() -> Observer:
    """Make the observer that shows what happens where this process is used."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    if not hasattr(shell, "kernel"):  # IPython in a terminal has none
        return line_observer(_print_line)
    cell = _Cell()
    return Observer(on_note=cell.add, on_stage=cell.add, on_progress=cell.replace)


def _print_line(line: str) -> None:
    print(plain(line), file=sys.stderr, flush=True)  # noqa: T201 - what it is for


class _Cell:
    """A text of a notebook that is replaced as it grows; stderr would be on red there."""

    def __init__(self) -> None:
        self._lines: list[str] = []
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
