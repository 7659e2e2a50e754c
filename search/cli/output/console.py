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
_MOST_LINES = 3
"""Lines of a folded cell; with more, a table is harder to read than its rows one below the other."""


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
    """Print a table on stdout, or one row below the other where it doesn't fit a line.

    Args:
        title: Line above the table.
        headings: Headings of the columns with ` | ` between them. One with `>` before it is of numbers, which are
            right-aligned and not folded. Where the table doesn't fit, columns without any value are left out, then
            those with `?` before that, the last ones first.
        rows: Cells of each row.
        last_of_blocks: Indices of rows with a line below them.
    """
    if title is not None:
        # Not rich's own title, which is folded at the table's width.
        output.print(title, style="italic", soft_wrap=True)
    columns = [_Column(heading, [row[place] for row in rows]) for place, heading in enumerate(headings.split(" | "))]
    shown, widths = list(columns), _widths(columns)
    empty = [column for column in columns if column.is_empty]
    for column in [*empty, *(each for each in columns[::-1] if each.optional and not each.is_empty)]:
        if widths is None:
            shown.remove(column)
            widths = _widths(shown)
    if widths is None:
        _print_rows(columns)
        return
    table = Table(header_style="bold")
    for column, width in zip(shown, widths, strict=True):
        justify: JustifyMethod = "right" if column.numeric else "left"
        table.add_column(column.name, justify=justify, width=width, overflow="fold")
    for index in range(len(rows)):
        table.add_row(*(column.cells[index] for column in shown), end_section=index in last_of_blocks)
    output.print(table)
    if len(shown) < len(columns):
        names = ", ".join(column.line for column in columns if column not in shown)
        errors.print(f"left out, since the table is too wide: {names}", soft_wrap=True)


class _Column:
    """A column of a table.

    Attributes:
        fewest, widest: Characters of a line with words of headings and lines of text folded, and with nothing folded.
    """

    def __init__(self, heading: str, cells: Sequence[str | Text]) -> None:
        self.optional, self.numeric = heading.startswith("?"), heading.removeprefix("?").startswith(">")
        self.name, self.cells = heading.removeprefix("?").removeprefix(">"), cells
        self.line = " ".join(self.name.split())
        self.is_empty = all(str(cell) in ("", "-") for cell in cells)
        lines = [line for cell in cells for line in plain(str(cell)).split("\n")]
        words = self.name.split() + [word for line in lines for word in line.split() if len(word) <= _LONGEST_WORD]
        fewest = max(map(cell_len, [*self.name.split(), *lines] if self.numeric else words), default=0)
        self.widest = max(map(cell_len, [*self.name.split("\n"), *lines]))
        self.fewest = fewest if self.numeric else min(self.widest, max(_FEWEST, fewest))

    def is_crowded(self, width: int) -> bool:
        """Whether a cell takes too many lines of so many characters."""
        # Most of a line is enough for text of any length, such as a prompt: more lines of it are no narrower.
        if width >= min(self.widest, output.width // 2):
            return False
        texts = (plain(str(cell)) for cell in self.cells if cell_len(str(cell)) > width)
        return any(
            len(Text(text).wrap(output, width, overflow="fold")) > max(_MOST_LINES, text.count("\n") + 1)
            for text in texts
        )


def _widths(columns: Sequence[_Column]) -> list[int] | None:
    """Characters of a line that each column gets; None if they don't fit, or a cell would take too many lines."""
    widths = [column.fewest for column in columns]
    room = output.width - 1 - sum(width + 3 for width in widths)
    if room < 0:
        return None
    lacks = [column.widest - column.fewest for column in columns]
    # Room is shared out from the column that lacks least of it on, so that few columns are folded.
    for waiting, place in zip(range(len(lacks), 0, -1), sorted(range(len(lacks)), key=lacks.__getitem__), strict=True):
        more = min(lacks[place], room // waiting)
        widths[place] += more
        room -= more
    crowded = any(column.is_crowded(width) for column, width in zip(columns, widths, strict=True))
    return None if crowded else widths


def _print_rows(columns: Sequence[_Column]) -> None:
    """Print the rows of a table one below the other: a line for each heading with its cell, if that has a value."""
    label = min(max(cell_len(column.line) for column in columns), output.width // 2)
    for cells in zip(*(column.cells for column in columns), strict=True):
        for column, cell in zip(columns, cells, strict=True):
            text = plain(str(cell))
            if text in ("", "-"):
                continue
            shown = Text(" ".join(text.split("\n")) if column.numeric else text)
            name = column.line
            for line in shown.wrap(output, max(output.width - label - 2, _FEWEST), overflow="fold"):
                output.print(Text.assemble((f"{name:<{label}}", "bold"), "  ", line), soft_wrap=True)
                name = ""
        output.print()


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
        # A second one would end Ray's own end with a traceback. What is registered last is called first.
        for each in (signal.SIGINT, *signals):
            atexit.register(signal.signal, each, signal.SIG_IGN)
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
