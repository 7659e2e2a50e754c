"""The terminal: tables and JSON go to stdout, progress and errors to stderr; interrupted commands exit with a line."""

from __future__ import annotations

import atexit
import json
import os
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import typer
from rich.cells import cell_len
from rich.console import Console, JustifyMethod
from rich.table import Table
from rich.text import Text

import moevolve
from moevolve.search.interface.tables import csv_text, flat, plain

_PIPE_WIDTH = 80
"""Characters of a line in a pipe, unless COLUMNS says otherwise."""
_FEWEST, _LONGEST_WORD = 12, 20
"""Characters to which a column of text may be narrowed by folding it, and the longest word that isn't folded."""


class _Console(Console):
    """Shows strings as they are, those in tables too, without markup; colours come from `Text` or a style."""

    def render_str(self, text: str, **how: Any) -> Text:
        """Convert each string that is printed."""
        return super().render_str(plain(text), **how)


def _console(*, stderr: bool = False) -> Console:
    console = _Console(stderr=stderr, markup=False, highlight=False, emoji=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = _PIPE_WIDTH
    return console


output = _console()
errors = _console(stderr=True)


def print_json(value: Any) -> None:
    """Print a record, or plain data, as one JSON document on stdout."""
    typer.echo(json.dumps(moevolve.as_data(value), indent=2, ensure_ascii=False, allow_nan=False))


def print_csv(rows: Iterable[Any]) -> None:
    """Print a listing's records as CSV on stdout."""
    typer.echo(csv_text(map(flat, rows)), nl=False)


def print_table(
    title: str | None,
    headings: str,
    rows: Sequence[Sequence[str | Text]],
    last_of_blocks: Sequence[int] = (),
) -> None:
    """Print a table on stdout.

    Args:
        title: Line above the table.
        headings: Headings of the columns with ` | ` between them. One with `>` before it is of numbers, which are
            right-aligned. Where the table is too wide, those without any value are left out, then those with `?` before
            that, the last ones first.
        rows: Cells of each row.
        last_of_blocks: Indices of rows with a line below them.
    """
    if title is not None:
        # Not rich's own title, which is folded at the table's width.
        output.print(title, style="italic", soft_wrap=True)
    columns = [_Column(heading, [row[place] for row in rows]) for place, heading in enumerate(headings.split(" | "))]
    shown = list(columns)
    empty = [column for column in columns if column.is_empty]
    for column in [*empty, *(each for each in columns[::-1] if each.optional and not each.is_empty)]:
        if _room(shown) < 0:
            shown.remove(column)
    table, room = Table(header_style="bold"), max(_room(shown), 0)
    # Room is shared out from the column that lacks least of it on, so that few columns are folded.
    for waiting, column in zip(range(len(shown), 0, -1), sorted(shown, key=lambda each: each.lack), strict=True):
        column.width += min(column.lack, room // waiting)
        room -= min(column.lack, room // waiting)
    for column in shown:
        justify: JustifyMethod = "right" if column.numeric else "left"
        table.add_column(column.name, justify=justify, width=column.width, overflow="fold")
    for index, row in enumerate(rows):
        table.add_row(*(row[columns.index(column)] for column in shown), end_section=index in last_of_blocks)
    output.print(table)
    if len(shown) < len(columns):
        names = ", ".join(" ".join(column.name.split()) for column in columns if column not in shown)
        errors.print(f"left out, since the table is too wide: {names}", soft_wrap=True)


class _Column:
    """A column of a table.

    Attributes:
        width: Characters that it gets: at first the fewest, with words of headings and lines of text folded.
        lack: Characters that it lacks to be shown unfolded.
    """

    def __init__(self, heading: str, cells: Sequence[str | Text]) -> None:
        self.optional, self.numeric = heading.startswith("?"), heading.removeprefix("?").startswith(">")
        self.name = heading.removeprefix("?").removeprefix(">")
        self.is_empty = all(str(cell) in ("", "-") for cell in cells)
        lines = [line for cell in cells for line in plain(str(cell)).split("\n")]
        words = self.name.split() + [word for line in lines for word in line.split() if len(word) <= _LONGEST_WORD]
        fewest = max(map(cell_len, [*self.name.split(), *lines] if self.numeric else words), default=0)
        widest = max(map(cell_len, [*self.name.split("\n"), *lines]))
        self.width = fewest if self.numeric else min(widest, max(_FEWEST, fewest))
        self.lack = widest - self.width


def _room(columns: Sequence[_Column]) -> int:
    """Characters of a line that columns leave, with their edges; negative if they don't fit."""
    return output.width - 1 - sum(column.width + 3 for column in columns)


_CANCELLED = "cancelled from elsewhere, for good; everything evaluated so far is in the store"
_INTERRUPTED = 130
INTERRUPTED = "interrupted; everything evaluated so far is in the store"
STOPPED = 3
"""Exit code of a search that was stopped or cancelled from elsewhere: neither done nor to be repeated."""


@contextmanager
def exit_with_message(
    interrupted: str,
    failure: type[Exception] | tuple[type[Exception], ...],
    hint: str = "",
    signals: Sequence[signal.Signals] = (signal.SIGTERM,),
    stopped: int = STOPPED,
) -> Iterator[None]:
    """Exit with one line on stderr if the work in the context is interrupted or fails.

    Args:
        interrupted: Line to print after Ctrl-C; the exit code is 130.
        failure: Type, or types, of error that ends with exit code 1.
        hint: Advice to add to the error.
        signals: Signals that count as Ctrl-C from now on, for example SIGTERM from a cluster manager.
        stopped: Exit code if the search was stopped or cancelled from elsewhere.
    """
    for each in signals:
        signal.signal(each, signal.default_int_handler)
    try:
        yield
    except KeyboardInterrupt as error:
        from moevolve.search.pools.base import StopRequested

        asked = error if isinstance(error, StopRequested) else None
        cancelled = asked is not None and asked.status == "cancelled"
        errors.print(_CANCELLED if cancelled else interrupted, soft_wrap=True)
        # A second Ctrl-C would end Ray's own end with a traceback. What is registered last is called first.
        atexit.register(signal.signal, signal.SIGINT, signal.SIG_IGN)
        raise typer.Exit(_INTERRUPTED if asked is None else stopped) from None
    except failure as error:
        errors.print(f"error: {error}{hint and f'; {hint}'}", soft_wrap=True)
        raise typer.Exit(1) from None


@contextmanager
def stages() -> Iterator[Callable[[str], None]]:
    """Show the current stage on a terminal, and nothing elsewhere."""
    if not errors.is_terminal:
        yield lambda _: None
        return
    with errors.status("starting") as status:
        yield lambda stage: status.update(Text(plain(stage)))
