"""The terminal: tables and JSON go to stdout, progress and errors to stderr; interrupted commands exit with a line."""

from __future__ import annotations

import atexit
import json
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from textwrap import wrap
from typing import Any

import typer
from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

import moevolve
from moevolve.search.text import plain

# Characters to which a column of text is narrowed at most by folding its lines.
_NARROWEST = 20


class _Console(Console):
    """Shows strings as they are, those in tables too, without markup; colours come from `Text` or a style."""

    def render_str(self, text: str, **how: Any) -> Text:
        """Convert each string that is printed."""
        return super().render_str(plain(text), **how)


output, errors = (_Console(stderr=stderr, markup=False, highlight=False, emoji=False) for stderr in (False, True))


def print_json(value: object) -> None:
    """Print a record, or plain data, as one JSON document on stdout."""
    typer.echo(json.dumps(moevolve.as_data(value), indent=2, ensure_ascii=False, allow_nan=False))


def print_table(
    title: str | None,
    headings: str,
    rows: Sequence[Sequence[str | Text]],
    last_of_blocks: Sequence[int] = (),
) -> None:
    """Print a table on stdout, as wide as the terminal, or wider if words and numbers would be broken.

    Args:
        title: Line above the table.
        headings: Headings of the columns with ` | ` between them. `>` before a heading marks a column of numbers,
            right-aligned and not folded.
        rows: Cells of each row.
        last_of_blocks: Indices of rows with a line below them.
    """
    if title is not None:
        # Not rich's own title, which is folded at the table's width.
        output.print(title, style="italic", soft_wrap=True)
    table = Table(box=SIMPLE_HEAD, header_style="bold", collapse_padding=True, pad_edge=False, show_edge=False)
    widths = []
    for place, heading in enumerate(headings.split(" | ")):
        numeric, name = heading.startswith(">"), heading.removeprefix(">")
        lines = [line for row in rows for line in plain(str(row[place])).split("\n")]
        folds = not numeric and any(" " in line for line in lines)
        width = max(map(cell_len, [*name.split(), *lines]), default=1)
        widths.append(min(width, _NARROWEST) if folds else width)
        table.add_column(
            name if folds else "\n".join(wrap(name, width)),
            justify="right" if numeric else "left",
            min_width=widths[-1],
            no_wrap=not folds,
            overflow="fold",
        )
    for index, row in enumerate(rows):
        table.add_row(*row, end_section=index in last_of_blocks)
    if sum(widths) + 2 * len(widths) > output.width:
        table.width = sum(widths) + 2 * len(widths)
    output.print(table, crop=False, no_wrap=True, overflow="ignore")


_CANCELLED = "cancelled from elsewhere, for good; everything evaluated so far is in the store"
_INTERRUPTED = 130
INTERRUPTED = "interrupted; everything evaluated so far is in the store"
# Exit code of a search that was stopped or cancelled from elsewhere: neither done nor to be repeated.
STOPPED = 3


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
