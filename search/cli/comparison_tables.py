"""A comparison's rows as tables for people and files for programs."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path

from moevolve.search.cli.console import millions, output, percent, print_table
from moevolve.search.comparing.rows import Measured, Row
from moevolve.search.comparing.significance import Significance
from moevolve.search.finalise import BEST_LABEL, FULL_LABEL

_NOTE = (
    "test: mean over seeds, 95 % interval over examples; +- standard deviation over seeds (random draws: over draws). "
    "p: paired tests on the examples, two-sided, against the full model and the best baseline. cost: models evaluated "
    "and workers' time for them, per search."
)


def print_tables(name: str, rows: Sequence[Row]) -> None:
    """One table per task and budget; with several tasks, one per budget that sums them up."""
    for title, headings, body in _tables(name, rows):
        print_table(title, [(heading, place > 0) for place, heading in enumerate(headings)], body)
    output.print(_NOTE, highlight=False)


def write_markdown(name: str, rows: Sequence[Row], path: Path) -> None:
    """The same tables for a document."""
    parts = []
    for title, headings, body in _tables(name, rows):
        lines = [headings, ["---", *(["---:"] * (len(headings) - 1))], *body]
        flat = ("| " + " | ".join(cell.replace("\n", ", ") for cell in line) + " |" for line in lines)
        parts.append(f"**{title}**\n\n" + "\n".join(flat) + "\n")
    path.write_text("\n".join([*parts, _NOTE, ""]), encoding="utf-8")


def write_csv(rows: Sequence[Row], path: Path) -> None:
    """One line per row, task and split."""
    fields = ["task", "budget", "method", "contestant", "baseline", "seeds"]
    fields += ["split", "of_task", "score", "low", "high", "spread", "parameters", "active_parameters"]
    fields += ["evaluations", "seconds", "p_full", "p_baseline", "refs", "failure"]
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(fields)
        for row in rows:
            for score in row.scores or (None,):
                writer.writerow(_line(row, score))


def _line(row: Row, score: Measured | None) -> list[object]:
    head = [row.task, row.budget, row.method, row.contestant, row.baseline, row.seeds]
    measured: list[object] = [None] * 6
    if score is not None:
        measured = [score.split, score.task, score.score, score.low, score.high, score.spread]
    tests = [None if test is None else test.p for test in (row.against_full, row.against_baseline)]
    costs = [row.parameters, row.active_parameters, row.evaluations, row.seconds]
    return [*head, *measured, *costs, *tests, " ".join(row.refs), row.failure]


def _tables(name: str, rows: Sequence[Row]) -> Iterator[tuple[str, list[str], list[list[str]]]]:
    """Title, headings and cells of every table."""
    for key, group in groupby(rows, key=lambda row: (row.task, row.budget)):
        yield ", ".join([name, *(label for label in key if label)]), *_table(list(group))
    tasks = list(dict.fromkeys(row.task for row in rows))
    for budget in dict.fromkeys(row.budget for row in rows) if len(tasks) > 1 else ():
        title = ", ".join([name, *([budget] if budget else []), "all tasks"])
        here = [row for row in rows if row.budget == budget]
        yield f"{title}: test; * another score than the best baseline's, p < 0.05", *_summary(tasks, here)


def _summary(tasks: Sequence[str], rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Contestants by tasks, headline scores."""
    found = {(_label(row), row.task): row for row in rows}
    body = []
    for label in dict.fromkeys(label for label, _ in found):
        cells = [found.get((label, task)) for task in tasks]
        body.append([label, *("-" if row is None else _headline(row) for row in cells)])
    return ["method", *tasks], body


def _headline(row: Row) -> str:
    test = row.against_baseline
    return _mean(row.headline) + (" *" if test is not None and test.p < 0.05 else "")


def _table(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Headings and cells; columns that would be empty are left out."""
    tasks = ["", *dict.fromkeys(score.task for row in rows for score in row.scores if score.task)]
    several = any(score.task for row in rows for score in row.scores if score.split != "test")
    columns = {"method": [_label(row) for row in rows]}
    for split in ("search", "dev"):
        columns[split] = [_mean(row.score(split)) for row in rows]  # type: ignore[arg-type]
    for task in tasks:
        heading = f"test: {task or 'all'}" if task or several else "test"
        columns[heading] = [_cell(row.score("test", task), full=not task) for row in rows]
    columns["p full"] = [_p(row.against_full) for row in rows]
    columns["p baseline"] = [_p(row.against_baseline) for row in rows]
    columns["parameters"] = [millions(round(row.parameters)) if row.scores else "-" for row in rows]
    columns["active"] = [millions(round(row.active_parameters)) if row.scores else "-" for row in rows]
    columns["cost"] = [f"{row.evaluations:.0f}\n{row.seconds:.0f} s" if row.evaluations else "-" for row in rows]
    kept = {heading: cells for heading, cells in columns.items() if set(cells) != {"-"}}
    return list(kept), [list(cells) for cells in zip(*kept.values(), strict=True)]


def _label(row: Row) -> str:
    label = row.method if row.baseline or row.method == FULL_LABEL or row.contestant == BEST_LABEL else ""
    label = label or f"{row.method}: {row.contestant}"
    return f"{label}\nfailed: {row.failure}" if row.failure else label


def _mean(score: Measured | None) -> str:
    return "-" if score is None else percent(score.score)


def _cell(score: Measured | None, *, full: bool) -> str:
    if score is None or not full:
        return _mean(score)
    lines = [percent(score.score)]
    if score.spread is not None:
        lines[0] += f" +- {100 * score.spread:.1f}"
    if score.low is not None:
        lines.append(f"{percent(score.low)} - {percent(score.high)}")
    return "\n".join(lines)


def _p(test: Significance | None) -> str:
    if test is None:
        return "-"
    return "< 0.001" if test.p < 0.001 else f"{test.p:.3f}"
