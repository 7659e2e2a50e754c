"""The terminal: tables and JSON go to stdout, progress and errors to stderr; interrupted commands exit with a line."""

from __future__ import annotations

import atexit
import json
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import typer
from rich.console import Console, JustifyMethod
from rich.table import Table
from rich.text import Text

import moevolve
from moevolve.search.interface.tables import csv_text, flat, plain

_PIPE_WIDTH = 140


class _Console(Console):
    """Shows strings as they are, those in tables too, without markup; colours come from `Text` or a style."""

    def render_str(self, text: str, **how: Any) -> Text:
        """Convert each string that is printed."""
        return super().render_str(plain(text), **how)


def _console(*, stderr: bool = False) -> Console:
    console = _Console(stderr=stderr, markup=False, highlight=False, emoji=False)
    if not console.is_terminal:
        # A pipe has no width; rich would fold tables at 80 columns.
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
            right-aligned.
        rows: Cells of each row.
        last_of_blocks: Indices of rows with a line below them.
    """
    if title is not None:
        # Not rich's own title, which is folded at the table's width.
        output.print(title, style="italic", soft_wrap=True)
    table = Table(header_style="bold")
    for heading in headings.split(" | "):
        numeric = heading.startswith(">")
        justify: JustifyMethod = "right" if numeric else "left"
        table.add_column(heading.removeprefix(">"), justify=justify, no_wrap=numeric, overflow="fold")
    for index, row in enumerate(rows):
        table.add_row(*row, end_section=index in last_of_blocks)
    output.print(table)


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
