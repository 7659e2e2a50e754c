"""Prints the tables of a study, and writes them as Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path

from rich.text import Text

from moevolve.evaluators.scales import scales_title
from moevolve.search.cli.output.console import output, print_table
from moevolve.search.loop.final_table import BEST_LABEL, FULL_LABEL
from moevolve.search.loop.scores import Score
from moevolve.search.loop.significance import Significance, holm
from moevolve.search.results.study import StudyRow
from moevolve.search.text import duration, parameter_count, score_lines

# Columns for the score that counts; the first that exists has it.
_HEADLINES = ("test", "test: all", "search")
_OF_TASK = "test: "
_P_BASELINE = "p baseline\n(Holm)"


def print_tables(name: str, rows: Sequence[StudyRow]) -> None:
    """Print what counts, a table per task and budget; with several tasks, also a summary per budget."""
    for title, columns in _groups(name, rows):
        headings, body, ends = _brief(columns)
        print_table(title, " | >".join(headings), body, ends)
    for title, tasks, scores in _summaries(name, rows):
        print_table(title, " | >".join(tasks), scores)
    output.print(f"{_note(rows)} With -o FILE.md or --json you get the scores on all splits.", soft_wrap=True)


def write_markdown(name: str, rows: Sequence[StudyRow], path: Path) -> None:
    """Write these tables with all their columns as Markdown."""
    parts = []
    groups = ((title, list(columns), zip(*columns.values(), strict=True)) for title, columns in _groups(name, rows))
    for title, headings, body in (*groups, *_summaries(name, rows)):
        lines = [headings, ["---", *(["---:"] * (len(headings) - 1))], *body]
        joined = ("| " + " | ".join(line) + " |" for line in lines)
        flat = (line.replace("\n+-", " +-").replace("\n(", " (").replace("\n", ", ") for line in joined)
        parts.append(f"**{title}**\n\n" + "\n".join(flat) + "\n")
    path.write_text("\n".join([*parts, _note(rows), ""]), encoding="utf-8")


def _note(rows: Sequence[StudyRow]) -> str:
    """Return how to read the tables."""
    tests = [test for row in rows for test in (row.against_full, row.against_baseline) if test is not None]
    over = "examples and seeds" if any(test.seeds > 1 for test in tests) else "examples"
    sentences = [
        (
            f"test: mean over seeds, 95 % interval over {over}; +- standard deviation over seeds (random draws: over "
            "draws). cost: models evaluated and workers' time for them, per search."
        )
    ]
    if tests:
        sentences.append(
            f"p: paired tests on test, over {over}, two-sided, against the full model or the best baseline, corrected "
            "for the tests of one column (Holm)."
        )
    if any(test.seeds == 1 for test in tests):
        sentences.append("With one seed, intervals and p don't cover the variation between seeds.")
    if any(row.best_by == "search" and row.against_baseline is not None for row in rows):
        sentences.append("The best baseline is the best on search where not all were scored on dev.")
    return " ".join(sentences)


def _groups(name: str, rows: Sequence[StudyRow]) -> Iterator[tuple[str, dict[str, list[str]]]]:
    """Title of every task and budget, and the cells of its table by heading."""
    for key, group in groupby(rows, key=lambda row: (row.task, row.budget)):
        here = list(group)
        shown = scales_title(score.scale for row in here for score in row.scores)
        yield ", ".join([name, *(label for label in key if label), shown]) + _best(here), _columns(here)


def _summaries(name: str, rows: Sequence[StudyRow]) -> Iterator[tuple[str, list[str], list[list[str]]]]:
    """Title, headings and cells of a table of all tasks per budget, if there are several tasks."""
    tasks = list(dict.fromkeys(row.task for row in rows))
    for budget in dict.fromkeys(row.budget for row in rows) if len(tasks) > 1 else ():
        title = ", ".join([name, *([budget] if budget else []), "all tasks: test"])
        here = [row for row in rows if row.budget == budget]
        starred = any(row.against_baseline is not None for row in here)
        star = "; * another score than the best baseline's, p < 0.05, corrected for all of this table (Holm)"
        yield title + (star if starred else ""), *_summary(tasks, here)


def _best(rows: Sequence[StudyRow]) -> str:
    """Name the best baseline and the split that ranked it."""
    found = ((row.against_baseline.against, row.best_by) for row in rows if row.against_baseline is not None)
    name, split = next(found, (None, None))
    return "" if name is None else f" (best baseline, by {split}: {name})"


def _summary(tasks: Sequence[str], rows: Sequence[StudyRow]) -> tuple[list[str], list[list[str]]]:
    """Contestants by tasks, headline scores."""
    corrected = dict(zip(map(id, rows), _corrected([row.against_baseline for row in rows]), strict=True))
    found = {(_label(row), row.task): row for row in rows}
    body = []
    for label in dict.fromkeys(label for label, _ in found):
        cells = [found.get((label, task)) for task in tasks]
        line = [label]
        for row in cells:
            p = None if row is None else corrected[id(row)]
            line.append("-" if row is None else _mean(row.headline) + (" *" if p is not None and p < 0.05 else ""))
        body.append(line)
    return ["method", *tasks], body


def _columns(rows: Sequence[StudyRow]) -> dict[str, list[str]]:
    """Cells by heading, without columns that would be empty."""
    tasks = ["", *dict.fromkeys(score.task for row in rows for score in row.scores if score.task)]
    several = any(score.task for row in rows for score in row.scores if score.split != "test")
    columns = {"method": [_label(row) for row in rows]}
    for split in ("search", "dev"):
        columns[split] = [_mean(row.score(split)) for row in rows]
    for task in tasks:
        heading = f"{_OF_TASK}{task or 'all'}" if task or several else "test"
        scores = [row.score("test", task) for row in rows]
        columns[heading] = [
            "-" if score is None else "\n".join(score_lines(score)[: 1 if task else None]) for score in scores
        ]
    columns["p full\n(Holm)"] = [_p(p) for p in _corrected([row.against_full for row in rows])]
    columns[_P_BASELINE] = [_p(p) for p in _corrected([row.against_baseline for row in rows])]
    columns["parameters"] = [parameter_count(round(row.parameters)) if row.scores else "-" for row in rows]
    columns["active"] = [parameter_count(round(row.active_parameters)) if row.scores else "-" for row in rows]
    columns["cost"] = [f"{row.evaluations:.0f}\n{duration(row.seconds)}" if row.evaluations else "-" for row in rows]
    return {heading: cells for heading, cells in columns.items() if set(cells) != {"-"}}


def _brief(columns: Mapping[str, list[str]]) -> tuple[list[str], list[list[str | Text]], list[int]]:
    """Return headings and cells of the main columns, each task's scores below all tasks', and tasks' last rows."""
    headline = next((heading for heading in _HEADLINES if heading in columns), "")
    headings = [each for each in ("method", headline, _P_BASELINE, "parameters", "cost") if each in columns]
    body: list[list[str | Text]] = [list(cells) for cells in zip(*map(columns.__getitem__, headings), strict=True)]
    ends = [len(body) - 1]
    for heading in columns if headline else ():
        if heading.startswith(_OF_TASK) and heading != headline:
            blank = [""] * (len(headings) - 2)
            pairs = zip(columns["method"], columns[heading], strict=True)
            body.append([Text(heading.removeprefix(_OF_TASK), "bold"), "", *blank])
            body += [[label, score, *blank] for label, score in pairs if score != "-"]
            ends.append(len(body) - 1)
    return headings, body, ends


def _corrected(tests: Sequence[Significance | None]) -> list[float | None]:
    """Return p-values of one family, corrected; None where no test was made."""
    return holm([None if test is None else test.p for test in tests])


def _label(row: StudyRow) -> str:
    label = row.method if row.baseline or row.method == FULL_LABEL or row.contestant == BEST_LABEL else ""
    label = label or f"{row.method}: {row.contestant}"
    return f"{label}\nfailed: {row.failure}" if row.failure else label


def _mean(score: Score | None) -> str:
    return "-" if score is None else score_lines(score)[0]


def _p(p: float | None) -> str:
    if p is None:
        return "-"
    return "< 0.001" if p < 0.001 else f"{p:.3f}"
