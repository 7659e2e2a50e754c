"""The table that ends a search."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from rich.markup import escape

from moevolve.evaluators.types import SPLITS
from moevolve.search.cli.console import millions, output, percent, print_table
from moevolve.search.finalise import Contestant, FinalReport, SplitScore
from moevolve.store.session import without_password


def print_report(report: FinalReport, store: str) -> None:
    """The contestants, one line each, in a block per task, and what to do next."""
    measured = {(score.task, score.split) for row in report.contestants for score in row.scores}
    splits = [split for split in SPLITS if any(split == name for _, name in measured)]
    tasks = list(dict.fromkeys(score.task for row in report.contestants for score in row.scores))
    sizes = ("parameters", *(["active"] if _tokens_skip_parameters(report) else []), "memory")
    columns = [("model", False), *((heading, True) for heading in (*splits, *sizes))]
    rows: list[list[str]] = []
    ends = []
    for task in tasks:
        if len(tasks) > 1:
            rows.append([f"[bold]{escape(task)}[/bold]", *[""] * (len(columns) - 1)])
        measured_on = [row for row in report.contestants if any(score.task == task for score in row.scores)]
        rows += [_row(contestant, task, splits, sizes, report) for contestant in measured_on]
        ends.append(len(rows) - 1)
    print_table(
        f"{report.search} on {', '.join(tasks)}: "
        "score in % with 95 % interval (mean of draws: +- one standard deviation)",
        columns,
        rows,
        ends,
    )
    if report.winner is None:
        output.print("every individual failed; see `moevolve searches` and `moevolve show` for the reasons")
        return
    output.print("Next:", highlight=False)
    store = shlex.quote(without_password(store))
    ranking = f"--task {tasks[0]}" if len(tasks) == 1 else f"--search {report.search}"
    for command in (
        f"moevolve best {ranking} --store {store}",
        f"moevolve show {report.winner} --store {store}",
        f"moevolve export {report.winner} ./{report.search}-model --store {store}",
    ):
        output.print(f"  {command}", highlight=False, soft_wrap=True)


def _tokens_skip_parameters(report: FinalReport) -> bool:
    """Whether a dense model became one of which a token uses a part: that part is then what was saved."""
    full, *others = report.contestants
    dense = full.active_parameters == full.parameters
    return dense and any(one.active_parameters < one.parameters for one in others)


def _row(
    contestant: Contestant, task: str, splits: Sequence[str], sizes: Sequence[str], report: FinalReport
) -> list[str]:
    scores = {score.split: score for score in contestant.scores if score.task == task}
    label = contestant.label if contestant.ref is None else f"{contestant.label}\n{contestant.ref}"
    shown = {
        "parameters": _share(contestant.parameters, report),
        "active": _share(contestant.active_parameters, report),
        "memory": f"{contestant.parameters * report.dtype_bytes / 2**20:,.0f} MiB",
    }
    return [label, *(_cell(scores.get(split), contestant) for split in splits), *(shown[size] for size in sizes)]


def _share(parameters: int, report: FinalReport) -> str:
    return f"{millions(parameters)}\n{100 * parameters / report.parameters_full:.0f} %"


def _cell(score: SplitScore | None, contestant: Contestant) -> str:
    if score is None:
        return "-"
    if contestant.draws:
        return f"{percent(score.score)}\n+- {100 * (score.high - score.score):.1f}"
    return f"{percent(score.score)}\n{percent(score.low)} - {percent(score.high)}"
