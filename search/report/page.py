"""A report as one HTML file that needs nothing else."""

from __future__ import annotations

from moevolve.evaluators.types import SCORED
from moevolve.search.report.contents import Contents, gather
from moevolve.search.report.drawings import drawings_of
from moevolve.search.report.rendering import FOLDER, environment
from moevolve.search.requests.searches import ReportRequest
from moevolve.search.text import percent
from moevolve.store.reader import StoreReader

_LINE = 12
"""Ancestors of the main line that are listed: the oldest, and the youngest ones."""


def render_page(contents: Contents) -> str:
    """The page; the same contents give the same text."""
    line = contents.line
    skipped = max(0, len(line) - _LINE)
    return (
        environment()
        .get_template("report.jinja")
        .render(
            c=contents,
            search=contents.search,
            drawings=drawings_of(contents),
            splits=SCORED,
            line=line if not skipped else (line[0], *line[skipped + 1 :]),
            skipped=skipped,
            verdict=_verdict(contents),
            style=(FOLDER / "static" / "style.css").read_text(encoding="utf-8"),
        )
    )


def page_of(store: StoreReader, request: ReportRequest) -> bytes:
    """See `ReportRequest`."""
    return render_page(gather(store, request.search, request.limit)).encode()


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
        against = "" if whole is None or whole.score is None else f", the full model {percent(whole.score)} %"
        parts.append(f"{percent(measured[-1].score)} % on {task} ({found.split}{against})")
    return f"{has}. It scores {'; '.join(parts)}." if parts else f"{has}."
