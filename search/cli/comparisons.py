"""`compare`."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moevolve.search.cli._console import JsonOption, print_json, told_in_a_line
from moevolve.search.cli.searches import INTERRUPTED, AddressOption, as_override

if TYPE_CHECKING:
    from moevolve.search.compare.config import Cell, Comparison
    from moevolve.search.service.launch import Observer


def register(app: typer.Typer) -> None:
    app.command()(compare)


def compare(
    config: Annotated[Path, typer.Argument(help="Comparison (YAML).")],
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Override a setting, e.g. base.workers.count=4."),
    ] = None,
    store: Annotated[
        str | None, typer.Option("--store", envvar="MOEVOLVE_STORE", help="SQLAlchemy URL; default: the base's.")
    ] = None,
    address: AddressOption = None,
    csv: Annotated[Path | None, typer.Option("--csv", help="Also write the rows to this CSV file.")] = None,
    markdown: Annotated[Path | None, typer.Option("--markdown", help="Also write the tables to this file.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Run searches and baselines side by side and print one table. Ctrl-C leaves it resumable: run it again."""
    from moevolve.search.cli.comparison_tables import print_tables, write_csv, write_markdown
    from moevolve.search.compare.config import load_comparison
    from moevolve.search.compare.rows import comparison_rows
    from moevolve.search.compare.run import run_comparison
    from moevolve.search.pools.base import PoolError
    from moevolve.store.repository import Store

    changes = {"base.store": store, "base.workers.address": address}
    extra = tuple(as_override(key, value) for key, value in changes.items() if value is not None)
    comparison = load_comparison(config, (*(overrides or ()), *extra))
    for path in (csv, markdown):
        _check_target(path)
    hint = "run the same command again to go on"
    with told_in_a_line(f"{INTERRUPTED}, {hint}", PoolError, hint), Store.open(comparison.store) as opened:
        rows = comparison_rows(run_comparison(comparison, opened, _watch(comparison)), opened)
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
    from moevolve.search.cli.progress import line_observer

    total = len(comparison.cells)

    def observer(place: int, cell: Cell) -> Observer:
        return line_observer(f"[{place + 1}/{total}] {cell.config.name}", 2)

    return observer


def _check_target(path: Path | None) -> None:
    """Whether a file can be written there is better known before hours of searches than after."""
    from moevolve.evaluators.errors import UserError

    if path is None:
        return
    if not path.parent.is_dir():
        raise UserError(f"{path}: the folder {path.parent} doesn't exist")
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise UserError(f"{path}: can't be written; give the path of a file")
