"""A report as one HTML file that needs nothing else."""

from __future__ import annotations

from pathlib import Path

from moevolve.evaluators.errors import UserError
from moevolve.evaluators.types import SPLITS
from moevolve.search.config import StoredConfig
from moevolve.search.reporting.contents import Contents
from moevolve.search.reporting.drawings import drawings_of
from moevolve.search.reporting.standings import Cell, Row
from moevolve.workers.facts import DTYPE_BYTES

_LINE = 12
"""Ancestors of the main line that are listed: the oldest, and the youngest ones."""

_MANY_MEBIBYTES = 10_000


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
        "duration": _duration,
        "svg": Markup,  # our own drawing, whose texts are escaped already
    }
    line = contents.line
    skipped = max(0, len(line) - _LINE)
    return environment.get_template("report.html.jinja").render(
        c=contents,
        s=contents.search,
        drawings=drawings_of(contents),
        splits=SPLITS,
        cell=_cell,
        size=lambda row: _size(row, contents.config),
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


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.1f} s"
    minutes, hours = seconds / 60, seconds / 3600
    return f"{minutes:.1f} min" if minutes < 120 else f"{hours:.1f} h"


def _cell(row: Row, task: str, split: str) -> Cell | None:
    return row.cells.get((task, split))


def _size(row: Row, config: StoredConfig) -> tuple[str, str, str] | None:
    """Parameters, share of the full model's, memory of the weights."""
    if row.parameters is None or not row.parameters_full:
        return None
    count = f"{row.parameters / 1e9:.2f} B" if row.parameters >= 1e9 else f"{row.parameters / 1e6:.2f} M"
    mebibytes = row.parameters * DTYPE_BYTES[config.model.dtype] / 2**20
    memory = f"{mebibytes:,.0f} MiB" if mebibytes < _MANY_MEBIBYTES else f"{mebibytes / 2**10:,.1f} GiB"
    return count, f"{100 * row.parameters / row.parameters_full:.0f} %", memory


def _verdict(contents: Contents) -> str:
    """The result in one sentence, on the split that is the least optimistic one measured."""
    winner = contents.standings.winner
    if winner is None:
        failed = contents.counts["failed"]
        return f"Nothing found: {'no individual is evaluated yet' if not failed else f'{failed} individuals failed'}."
    best, full = contents.standings.rows[-1], contents.standings.rows[0]
    one = winner.individual
    kept, used = (100 * number / one.parameters_full for number in (one.parameters, one.active_parameters))
    has = f"{winner.ref} has {kept:.0f} % of the full model's parameters, and uses {used:.0f} % per token"
    parts = []
    for task in contents.standings.tasks:
        split = next((s for s in ("test", "dev", "search") if (task, s) in best.cells), None)
        found = None if split is None else best.cells[task, split]
        if split is None or found is None or found.failure is not None:
            continue
        whole = full.cells.get((task, split))
        against = "" if whole is None or whole.failure is not None else f", the full model {_percent(whole.score)} %"
        parts.append(f"{_percent(found.score)} % on {task} ({split}{against})")
    return f"{has}. It scores {'; '.join(parts)}." if parts else f"{has}."
