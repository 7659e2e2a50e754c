"""`compare`."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import moevolve
from moevolve.search.cli._console import print_json, told_in_a_line
from moevolve.search.cli._following import INTERRUPTED
from moevolve.search.cli._options import AddressOption, JsonOption, NewStoreOption
from moevolve.search.cli.output.progress import line_observer

if TYPE_CHECKING:
    from moevolve import Comparison, Observer
    from moevolve.search.compare.config import Cell


def compare(
    config: Annotated[Path, typer.Argument(help="Comparison (YAML).")],
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Override a setting, e.g. base.workers.count=4."),
    ] = None,
    store: NewStoreOption = None,
    address: AddressOption = None,
    csv: Annotated[Path | None, typer.Option("--csv", help="Also write the rows to this CSV file.")] = None,
    markdown: Annotated[Path | None, typer.Option("--markdown", help="Also write the tables to this file.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Run searches and baselines side by side and print one table. Ctrl-C leaves it resumable: run it again."""
    comparison = moevolve.load_comparison(config, store=store, address=address, overrides=overrides or ())
    for path in (csv, markdown):
        _check_target(path)
    hint = "run the same command again to go on"
    with told_in_a_line(f"{INTERRUPTED}, {hint}", moevolve.PoolError, hint):
        rows = moevolve.compare(comparison, observer=_watch(comparison))
    # Not sooner: it loads what comparisons are made with.
    from moevolve.search.cli.output.comparison import print_tables, write_csv, write_markdown

    if csv is not None:
        write_csv(rows, csv)
    if markdown is not None:
        write_markdown(comparison.name, rows, markdown)
    if as_json:
        print_json(rows)
    else:
        print_tables(comparison.name, rows)


def _watch(comparison: Comparison) -> Callable[[int, Cell], Observer]:
    """A line per search: a comparison is a matter of hours, and its log is read afterwards."""
    total = len(comparison.cells)

    def observer(place: int, cell: Cell) -> Observer:
        return line_observer(f"[{place + 1}/{total}] {cell.config.name}", 2)

    return observer


def _check_target(path: Path | None) -> None:
    """Whether a file can be written there is better known before hours of searches than after."""
    if path is None:
        return
    if not path.parent.is_dir():
        raise moevolve.UserError(f"{path}: the folder {path.parent} doesn't exist")
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise moevolve.UserError(f"{path}: can't be written; give the path of a file")
