"""The table that ends a search."""

from __future__ import annotations

from moevolve.search.cli.console import millions, output, percent, print_table
from moevolve.search.finalise import Contestant, FinalReport, SplitScore

_ORDER = ("search", "dev", "test")


def print_report(report: FinalReport, store: str) -> None:
    """The contestants, one line each in a table per task, and what to do next."""
    measured = _columns(report)
    for task in dict.fromkeys(task for task, _ in measured):
        pairs = [pair for pair in measured if pair[0] == task]
        splits = [(split, True) for _, split in pairs]
        print_table(
            f"{report.search} on {task}: score in % with 95 % interval (mean of draws: +- one standard deviation)",
            [("model", False), *splits, ("parameters", True), ("memory", True)],
            [_row(contestant, pairs, report) for contestant in report.contestants],
        )
    if report.winner is None:
        output.print("every individual failed; see `moevolve searches` and `moevolve show` for the reasons")
        return
    output.print("Next:", highlight=False)
    task = measured[0][0]
    for command in (
        f"moevolve best --task {task} --store {store}",
        f"moevolve show {report.winner} --store {store}",
        f"moevolve export {report.winner} ./{report.search}-model --store {store}",
    ):
        output.print(f"  {command}", highlight=False, soft_wrap=True)


def _columns(report: FinalReport) -> list[tuple[str, str]]:
    """Measured (task, split) pairs: splits in their order, tasks as configured."""
    pairs = dict.fromkeys((score.task, score.split) for row in report.contestants for score in row.scores)
    return sorted(pairs, key=lambda pair: _ORDER.index(pair[1]))


def _row(contestant: Contestant, measured: list[tuple[str, str]], report: FinalReport) -> list[str]:
    scores = {(score.task, score.split): score for score in contestant.scores}
    label = contestant.label if contestant.ref is None else f"{contestant.label}\n{contestant.ref}"
    share = contestant.parameters / report.parameters_full
    size = f"{millions(contestant.parameters)}\n{100 * share:.0f} %"
    memory = f"{contestant.parameters * report.dtype_bytes / 2**20:,.0f} MiB"
    return [label, *(_cell(scores.get(pair), contestant) for pair in measured), size, memory]


def _cell(score: SplitScore | None, contestant: Contestant) -> str:
    if score is None:
        return "-"
    if contestant.draws:
        return f"{percent(score.score)}\n+- {100 * (score.high - score.score):.1f}"
    return f"{percent(score.score)}\n{percent(score.low)} - {percent(score.high)}"
