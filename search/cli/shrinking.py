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
from moevolve.search.shrink.page import advice
from moevolve.search.shrink.request import ShrinkRequest
from moevolve.search.text import duration
from moevolve.workers.export.folder import how_to_load, how_to_quantise

if TYPE_CHECKING:
    from collections.abc import Sequence

    from moevolve import ShrinkResult
    from moevolve.search.shrink.loops import Loops
    from moevolve.search.shrink.page import TaskCheck

_AGAIN = "give the same command again to go on"
_PANELS = {
    "Arguments": ("model",),
    "Options": ("data", "experts", "output", "time", "dry_run"),
    "What to keep, by one of these instead of --experts": (
        "neurons",
        "size",
        "keep_score",
        "active",
        "kind",
    ),
    "Data": ("tasks", "columns", "metric"),
    "Search": ("evaluations", "repair", "seed", "overrides", "store"),
    "Checks before the export": ("guard_time", "force"),
    "Output": ("custom_code", "push"),
}
"""Parameters as help shows them, the most used first; typer adds its own options to `Options`."""


@takes(ShrinkRequest, panels=_PANELS)
def shrink(request: ShrinkRequest, as_json: JsonOption = False) -> None:
    failures = (moevolve.PoolError, moevolve.ExportError)
    with exit_with_message(f"interrupted, {_AGAIN}", failures):
        found, _ = watched(partial(moevolve.ask, None, request), again=_AGAIN, name="shrink")
    if as_json:
        print_json(found)
    elif isinstance(found, moevolve.ShrinkPlan):
        output.print(found.content.rstrip(), soft_wrap=True)
        output.print(f"# in {found.run_file}; run it with: moevolve launch {found.run_file}", soft_wrap=True)
    else:
        _print_page(found)
        for gain in (found.code_gain, found.gain):
            if gain is not None:
                output.print(str(gain), soft_wrap=True)
        if found.pushed is not None:
            output.print(f"uploaded to {found.pushed}", soft_wrap=True)
        for choice in found.choices if found.sizes else ():  # what was found comes last
            output.print(choice, soft_wrap=True)
    if isinstance(found, moevolve.ShrinkResult) and found.written is None:
        raise typer.Exit(1)


def _print_page(found: ShrinkResult) -> None:
    print_entries(found.table)
    best, written = found.table.best, found.written
    if best is None:
        output.print(
            "every candidate failed; see `moevolve searches` and `moevolve show` for the reasons", soft_wrap=True
        )
        return
    _print_checks(found.checks, found.loops)
    if written is None:
        output.print(f"{found.table.winner} was not exported; --force exports it all the same", soft_wrap=True)
        return
    sides = found.sides()
    headings = " | >".join(sides[0]).replace(">experts", "experts")
    print_table(f"{found.model}, kept: {best.summary}", headings, [list(side.values()) for side in sides])
    if found.speed is not None:
        output.print(
            f"tokens/s and memory are those of plain transformers and one sequence on {found.speed.device}",
            soft_wrap=True,
        )
    took = ", ".join(f"{stage} {duration(seconds)}" for stage, seconds in found.seconds.items())
    output.print(f"took {took}", soft_wrap=True)
    if found.sizes:
        rows = found.size_rows()
        title = f"score kept by size, as in {found.run_file.with_name('sizes.svg')}"
        print_table(title, " | >".join(rows[0]), [list(row.values()) for row in rows])
    for choice in () if found.sizes else found.choices:
        output.print(choice, soft_wrap=True)
    output.print(f"wrote {written.directory} ({written.form} checkpoint of {found.table.winner})", soft_wrap=True)
    for title, names in written.changes:
        output.print(f"{title}: {names}", soft_wrap=True)
    output.print(how_to_load(written.directory, written.form), soft_wrap=True)
    output.print(
        f"the search is {found.table.search} in {found.store}; its settings are in {found.run_file}", soft_wrap=True
    )
    for line in how_to_quantise(written.directory, written.form):
        output.print(line, soft_wrap=True)


def _print_checks(checks: Sequence[TaskCheck], loops: Loops | None) -> None:
    headings = (
        "held-out prompts | >prompts | >loops | >JSON, calls lost | >agreement | >perplexity | >of the full score"
    )
    print_table(None, headings, [[check.task, *check.cells] for check in checks if check.known])
    unknown = [check.task for check in checks if not check.known]
    if unknown:
        output.print(f"not judged, since the full model doesn't know them: {', '.join(unknown)}", soft_wrap=True)
    worst = min((check for check in checks if check.known), key=lambda check: check.agreement, default=None)
    if worst is not None:
        output.print(f"least like the full model: {worst.task}", soft_wrap=True)
    for check in checks:
        for fault in check.faults:
            output.print(f"{check.task}: the candidate {fault}", soft_wrap=True)
    advised = advice(checks)
    if advised is not None:
        output.print(advised, soft_wrap=True)
    if loops is not None:
        output.print(str(loops), soft_wrap=True)
        if loops.fault is not None:
            output.print(f"all prompts: the candidate {loops.fault}", soft_wrap=True)
