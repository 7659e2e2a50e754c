"""A report as one HTML file that needs nothing else."""

from __future__ import annotations

from pathlib import Path

from moevolve.evaluators.errors import UserError
from moevolve.evaluators.types import SCORED
from moevolve.search.report.contents import Contents
from moevolve.search.report.drawings import drawings_of

_LINE = 12
"""Ancestors of the main line that are listed: the oldest, and the youngest ones."""


def render_page(contents: Contents) -> str:
    """The page; the same contents give the same text."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        undefined=StrictUndefined,
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "percent": _percent,
        "number": lambda value: "-" if value is None else f"{value:,}",
        "duration": duration,
        "typeset": lambda line: line.replace("+-", "\N{PLUS-MINUS SIGN}").replace(" - ", " \N{EN DASH} "),
        "svg": Markup,  # our own drawing, whose texts are escaped already
    }
    line = contents.line
    skipped = max(0, len(line) - _LINE)
    return environment.get_template("report.html.jinja").render(
        c=contents,
        s=contents.search,
        drawings=drawings_of(contents),
        splits=SCORED,
        line=line if not skipped else (line[0], *line[skipped + 1 :]),
        skipped=skipped,
        verdict=_verdict(contents),
    )


def write_page(contents: Contents, path: Path) -> None:
    """Write the page.

    Raises:
        UserError: the file can't be written.
    """
    text = render_page(contents)
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path}: can't be written: {error.strerror}") from None


def _percent(value: float) -> str:
    return f"{100 * value:.1f}"


def duration(seconds: float) -> str:
    """A time for people."""
    if seconds < 120:
        return f"{seconds:.1f} s"
    minutes, hours = seconds / 60, seconds / 3600
    return f"{minutes:.1f} min" if minutes < 120 else f"{hours:.1f} h"


def _verdict(contents: Contents) -> str:
    """The result in one sentence, on the split that is the least optimistic one measured."""
    table = contents.standings
    if table.best is None:
        failed = contents.counts["failed"]
        return f"Nothing found: {'no individual is evaluated yet' if not failed else f'{failed} individuals failed'}."
    kept, used = (
        100 * (number or 0) / (table.parameters_full or 1)
        for number in (table.best.parameters, table.best.active_parameters)
    )
    has = f"{table.winner} has {kept:.0f} % of the full model's parameters, and uses {used:.0f} % per token"
    parts = []
    for task in table.tasks:
        measured = [found for split in SCORED if (found := table.best.score(task, split)) is not None]
        if not measured or measured[-1].score is None:
            continue
        found = measured[-1]
        whole = table.full.score(task, found.split)
        against = "" if whole is None or whole.score is None else f", the full model {_percent(whole.score)} %"
        parts.append(f"{_percent(measured[-1].score)} % on {task} ({found.split}{against})")
    return f"{has}. It scores {'; '.join(parts)}." if parts else f"{has}."
