"""Commands that plan and compare searches: what one would take, and several side by side."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import moevolve
from moevolve.search.cli._requests import JsonOption, option, takes
from moevolve.search.cli.output.console import INTERRUPTED, exit_with_message, print_json, stages
from moevolve.search.cli.output.progress import line_observer
from moevolve.search.requests.planning import CompareRequest, EstimateRequest

if TYPE_CHECKING:
    from moevolve import Observer
    from moevolve.search.compare.config import Cell


@takes(EstimateRequest, "model")
def plan(
    request: EstimateRequest,
    models: Annotated[list[str] | None, option(EstimateRequest, "model", "Several models are compared.")] = None,
    as_json: JsonOption = False,
) -> None:
    with exit_with_message("interrupted; nothing was stored", moevolve.PoolError), stages() as on_stage:
        estimates = [
            moevolve.estimate(**(request.arguments() | {"model": model}), on_stage=on_stage)
            for model in models or (None,)
        ]
    if as_json:
        print_json(estimates[0] if len(estimates) == 1 else estimates)
        return
    # Imported late, since it loads what estimates are made with.
    from moevolve.search.cli.output.plan import print_plan, print_summary

    if len(estimates) > 1:
        print_summary(estimates)
    else:
        print_plan(estimates[0])


@takes(CompareRequest)
def compare(
    request: CompareRequest,
    csv: Annotated[Path | None, typer.Option("--csv", help="Also write the rows to this CSV file.")] = None,
    markdown: Annotated[Path | None, typer.Option("--markdown", help="Also write the tables to this file.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Run searches and baselines side by side and print one table. Ctrl-C leaves it resumable: run it again."""
    comparison = moevolve.load_comparison(**request.arguments())

    def observer(place: int, cell: Cell) -> Observer:
        # A comparison takes hours and its log is read afterwards, so each search prints two lines.
        return line_observer(f"[{place + 1}/{len(comparison.cells)}] {cell.config.name}", 2)

    for path in (csv, markdown):
        _check_writable(path)
    hint = "run the same command again to go on"
    with exit_with_message(f"{INTERRUPTED}, {hint}", moevolve.PoolError, hint):
        rows = moevolve.compare(comparison, observer=observer)
    # Imported late, since it loads what comparisons are made with.
    from moevolve.search.cli.output.comparison import print_tables, write_csv, write_markdown

    if csv is not None:
        write_csv(rows, csv)
    if markdown is not None:
        write_markdown(comparison.name, rows, markdown)
    if as_json:
        print_json(rows)
    else:
        print_tables(comparison.name, rows)


def _check_writable(path: Path | None) -> None:
    # Checked before hours of searches rather than after.
    if path is None:
        return
    if not path.parent.is_dir():
        raise moevolve.UserError(f"{path}: the folder {path.parent} doesn't exist")
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise moevolve.UserError(f"{path}: can't be written; give the path of a file")
