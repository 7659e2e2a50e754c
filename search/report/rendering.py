"""Jinja environment of reports and of the server's pages, with filters that format values."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from functools import cache
from importlib.metadata import version
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from moevolve.evaluators.scales import SCALES, scales_title
from moevolve.search.genomes.registry import legend
from moevolve.search.text import (
    date_time,
    duration,
    memory_size,
    parameter_count,
    percent,
    ranges,
    score_lines,
    size_lines,
)
from moevolve.store.errors import parsing
from moevolve.store.records import BestRow, ExportRecord, SearchRecord

FOLDER = Path(__file__).parent
# Names that need no quoting in a path.
_PLAIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@cache
def environment(folder: Path | None = None) -> Environment:
    """Return the environment of reports or, if the folder of their templates is given, of the server's pages.

    Only on the server's pages do tables link to the pages of individuals: a report is a file without a server.
    """
    found = Environment(
        loader=FileSystemLoader([*([folder] if folder else []), FOLDER / "templates"]),
        undefined=StrictUndefined,
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found.filters |= {
        "percent": percent,
        "scale": SCALES.__getitem__,
        "shown": lambda score, scale: SCALES[scale].text(score),
        "phrase": lambda score, scale: SCALES[scale].phrase(score),
        "change": lambda difference, scale: SCALES[scale].change(difference).replace("-", "\N{MINUS SIGN}"),
        "changes": lambda ends, scale: SCALES[scale].changes(*ends).replace("-", "\N{MINUS SIGN}"),
        "titles": lambda scales: scales_title(scales).capitalize(),
        "legend": legend,
        "number": lambda value: "-" if value is None else f"{value:,}",
        "size": parameter_count,
        "lines": score_lines,
        "size_lines": size_lines,
        "memory": memory_size,
        "ranges": ranges,
        "cells": cells,
        "checks": export_checks,
        "duration": duration,
        "when": when,
        "handle": handle,
        "shell": shlex.quote,
        "typeset": lambda line: (
            line.replace("+-", "\N{PLUS-MINUS SIGN}").replace(" - ", " \N{EN DASH} ").replace("`", "")
        ),
    }
    found.globals.update(version=version("moevolve"), linked=folder is not None)
    return found


def export_checks(export: ExportRecord) -> list[str]:
    """Return the results of an export's checks as lines such as `max difference: 1.6e-07`."""
    with parsing(f"the checks of export {export.path}"):
        found = json.loads(export.checks).items()
    shown = {name: f"{value:.2g}" if isinstance(value, float) else value for name, value in found}
    return [f"{name.replace('_', ' ')}: {value}" for name, value in shown.items()]


def handle(search: SearchRecord | BestRow) -> str:
    """Return the name of a search in a URL path, or its id if the name needed quoting."""
    name, key = (search.name, search.id) if isinstance(search, SearchRecord) else (search.search_name, search.search_id)
    return name if _PLAIN.fullmatch(name) else key


def table_page(title: str, caption: str, rows: Sequence[Mapping[str, str]], note: str) -> str:
    """Return a page with one table, whose rows have the same columns, and a note below it."""
    style = Markup((FOLDER / "static" / "style.css").read_text(encoding="utf-8"))
    page = environment().get_template("table.jinja")
    return page.render(title=title, caption=caption, rows=rows, note=note, style=style)


def cells(places: Iterable[int]) -> str:
    """Return an SVG path of a cell for each of some places in a row, with gaps between them."""
    return "".join(f"M{place} 0h.85v1h-.85z" for place in places)


def when(moment: datetime | None) -> str | Markup:
    """Return a time in UTC as a `<time>` element; `-` for none."""
    if moment is None:
        return "-"
    return Markup('<time datetime="{}">{}</time>').format(moment.isoformat(timespec="seconds"), date_time(moment))
