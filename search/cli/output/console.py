"""Where output goes (tables and JSON to stdout, progress and errors to stderr), and how long commands end early."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

import moevolve

_PIPE_WIDTH = 140
_CONTROLS = {code: "\N{REPLACEMENT CHARACTER}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


def plain(text: str) -> str:
    """Text as a terminal may show it: without control characters, which could move its cursor or ask it things."""
    return text.translate(_CONTROLS)


class _Console(Console):
    """Shows strings as they are, whoever wrote them and wherever they stand; colours come from `Text` or a style."""

    def render_str(self, text: str, **how: Any) -> Text:
        """What each string on its way to the terminal becomes, those in tables included."""
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
    """A record, or plain data, as JSON on stdout, one document."""
    typer.echo(json.dumps(moevolve.as_data(value), indent=2, ensure_ascii=False, allow_nan=False))


def print_table(
    title: str | None,
    columns: Sequence[tuple[str, bool]],
    rows: Sequence[Sequence[str | Text]],
    last_of_blocks: Sequence[int] = (),
) -> None:
    """A table on stdout.

    Args:
        title: above the table.
        columns: heading, and whether it holds numbers (right-aligned).
        rows: cells, as they are or styled.
        last_of_blocks: a line is drawn below these rows.
    """
    if title is not None:
        # Above the table and not part of it: rich would fold it at the table's width.
        output.print(title, style="italic", soft_wrap=True)
    table = Table(header_style="bold")
    for heading, numeric in columns:
        table.add_column(heading, justify="right" if numeric else "left", no_wrap=numeric, overflow="fold")
    for index, row in enumerate(rows):
        table.add_row(*row, end_section=index in last_of_blocks)
    output.print(table)


_CANCELLED = "cancelled from elsewhere, for good; everything evaluated so far is in the store"
_INTERRUPTED = 130
INTERRUPTED = "interrupted; everything evaluated so far is in the store"
STOPPED = 3
"""Exit code where a search was stopped or cancelled by who isn't at its terminal: not done, and not to be repeated."""


@contextmanager
def exit_with_message(
    interrupted: str,
    failure: type[Exception],
    hint: str = "",
    signals: Sequence[signal.Signals] = (signal.SIGTERM,),
    stopped: int = STOPPED,
) -> Iterator[None]:
    """Exit with one line on stderr and a code where the work within is interrupted or fails.

    Args:
        interrupted: what to say after Ctrl-C; the code is 130.
        failure: the error that the user can do something about; the code is 1.
        hint: what, if the error doesn't say so itself.
        signals: taken for Ctrl-C from now on: a cluster manager stops a driver with SIGTERM.
        stopped: the code where who asks for the end isn't at the terminal.
    """
    for each in signals:
        signal.signal(each, signal.default_int_handler)
    try:
        yield
    except KeyboardInterrupt as error:
        from moevolve.search.pools.controlled import StopRequested

        asked = error if isinstance(error, StopRequested) else None
        told = _CANCELLED if asked is not None and asked.status == "cancelled" else interrupted
        errors.print(told, soft_wrap=True)
        raise typer.Exit(_INTERRUPTED if asked is None else stopped) from None
    except failure as error:
        errors.print(f"error: {error}{hint and f'; {hint}'}", soft_wrap=True)
        raise typer.Exit(1) from None


@contextmanager
def stages() -> Iterator[Callable[[str], None]]:
    """Shows what is happening on a terminal, and nothing elsewhere."""
    if not errors.is_terminal:
        yield lambda _: None
        return
    with errors.status("starting") as status:
        yield lambda stage: status.update(Text(plain(stage)))
