"""Prints the table that ends a search."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.text import Text

from moevolve.evaluators.scales import scales_title
from moevolve.evaluators.types import SCORED, Split
from moevolve.search.cli.output.console import output, print_table
from moevolve.search.text import memory_size, plain, score_lines, size_lines
from moevolve.store.session import without_password

if TYPE_CHECKING:
    from moevolve import Entry, FinalTable


def print_final_table(found: FinalTable, store: str) -> None:
    """Print the entries, and commands to run next."""
    print_entries(found)
    if found.winner is None:
        output.print(
            "every individual failed; see `moevolve searches` and `moevolve show` for the reasons", soft_wrap=True
        )
        return
    output.print("Next:")
    store = shlex.quote(without_password(store))
    ranking = f"--task {found.tasks[0]}" if len(found.tasks) + len(found.others) == 1 else f"--search {found.search}"
    for command in (
        f"moevolve best {ranking} --store {store}",
        f"moevolve show {found.winner} --store {store}",
        f"moevolve export {found.winner} ./{found.search}-model --store {store}",
    ):
        output.print(f"  {command}", soft_wrap=True)


def print_entries(found: FinalTable) -> None:
    """Print the entries, a line each in a block per task."""
    tasks = [*found.tasks, *found.others]
    measured = {score.split for one in found.entries for score in one.scores}
    splits = [split for split in SCORED if split in measured]
    full, *others = found.entries
    # A dense model became one whose tokens use only some parameters, so these show the saving.
    skips = full.active_parameters == full.parameters
    skips = skips and any(one.active_parameters != one.parameters for one in others)
    sizes = ("parameters", *(["active"] if skips else []), "memory")
    headings = ["model", *splits, *sizes]
    rows: list[list[str | Text]] = []
    ends = []
    for task in tasks:
        if len(tasks) > 1:
            rows.append([Text(plain(task), "bold"), *[""] * (len(headings) - 1)])
        scored = [one for one in found.entries if any(score.task == task for score in one.scores)]
        rows += [_row(one, task, splits, sizes, found) for one in scored]
        ends.append(len(rows) - 1)
    title = scales_title(score.scale for one in found.entries for score in one.scores)
    draws = " (mean of draws: +- one standard deviation)" if any(one.draws for one in found.entries) else ""
    print_table(
        f"{found.search} on {', '.join(tasks)}: {title}, with 95 % interval{draws}",
        " | >".join(headings),
        rows,
        ends,
    )


def _row(entry: Entry, task: str, splits: Sequence[Split], sizes: Sequence[str], found: FinalTable) -> list[str | Text]:
    scores = (entry.score(task, split) for split in splits)
    shown = {
        "parameters": size_lines(entry.parameters, found.parameters_full),
        "active": size_lines(entry.active_parameters, found.full.active_parameters),
        "memory": [memory_size(found.weight_bytes(entry.parameters))],
    }
    cells = [*(["-"] if score is None else score_lines(score) for score in scores), *(shown[size] for size in sizes)]
    label = [entry.label, *([] if entry.ref is None else [entry.ref])]
    return ["\n".join(lines) for lines in (label, *cells)]
