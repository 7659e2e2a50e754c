"""The command that makes a smaller checkpoint of a checkpoint and files of requests."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import typer

import moevolve
from moevolve.search.cli._requests import JsonOption, takes
from moevolve.search.cli.output.console import exit_with_message, output, print_json, print_table
from moevolve.search.cli.output.final_table import print_entries
from moevolve.search.cli.running import watched
from moevolve.search.shrink.request import ShrinkRequest

if TYPE_CHECKING:
    from moevolve import ShrinkResult
    from moevolve.search.shrink.record import Checks

_AGAIN = "give the same command again to go on"
# Parameters as help shows them, the most used first; typer adds its own options to `Options`.
_PANELS = {
    "Arguments": ("model",),
    "Options": ("data", "experts", "output", "time", "dry_run"),
    "Amounts to keep; give one instead of --experts": ("neurons", "size", "keep_score", "active"),
    "Data": ("tasks", "columns", "metric"),
    "Search": ("evaluations", "repair", "seed", "overrides", "store"),
    "Checks before the export": ("guard_time", "force"),
    "Output": ("custom_code",),
}


@takes(ShrinkRequest, panels=_PANELS)
def shrink(request: ShrinkRequest, as_json: JsonOption = False) -> None:
    failures = (moevolve.PoolError, moevolve.ExportError, moevolve.ProfileError)
    with exit_with_message(f"interrupted, {_AGAIN}", failures):
        found, _ = watched(partial(moevolve.ask, None, request), again=_AGAIN, name="shrink")
    if as_json:
        print_json(found)
    elif isinstance(found, moevolve.ShrinkPlan):
        output.print(found.content.rstrip(), soft_wrap=True)
        output.print(f"# in {found.run_file}; run it with: moevolve launch {found.run_file}", soft_wrap=True)
    else:
        _print_page(found)
    if isinstance(found, moevolve.ShrinkResult) and found.record.written is None:
        raise typer.Exit(1)


def _print_page(found: ShrinkResult) -> None:
    record, best = found.record, found.table.best
    print_entries(found.table)
    if best is None:
        output.print(
            "every candidate failed; see `moevolve searches` and `moevolve show` for the reasons", soft_wrap=True
        )
        return
    if record.checks is not None:
        _print_checks(record.checks)
    sides = found.sides()
    if sides:
        headings = " | >".join(sides[0]).replace(">experts", "experts")
        print_table(record.model, headings, [list(side.values()) for side in sides])
    rows = found.size_rows()
    if rows:
        print_table("score kept by size", ">" + " | ".join(rows[0]), [list(row.values()) for row in rows])
    for line in found.lines():
        output.print(line, soft_wrap=True)


def _print_checks(checks: Checks) -> None:
    headings = "held-out prompts | >prompts | >loops | >JSON, calls lost | >agreement | >perplexity | >score kept"
    known = [check for check in checks.tasks if check.known]
    print_table(None, headings, [[check.task, *check.cells] for check in known])
