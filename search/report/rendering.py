"""Templates of reports and of the server's pages, and how values are written in them."""

from __future__ import annotations

import re
import shlex
from datetime import datetime
from functools import cache
from importlib.metadata import version
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from moevolve.search.text import memory_size, parameter_count, percent, score_lines, size_lines
from moevolve.store.records import BestRow, SearchRecord

FOLDER = Path(__file__).parent
_PLAIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
"""Names that are the same in a path."""


@cache
def environment(folder: Path | None = None) -> Environment:
    """Templates of reports, and those of a server's pages if their folder is given.

    With that, tables of both link to individuals' pages; a report is a file that leads nowhere.
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
        "points": lambda value: f"{100 * value:+.1f}".replace("-", "\N{MINUS SIGN}"),
        "number": lambda value: "-" if value is None else f"{value:,}",
        "size": parameter_count,
        "lines": score_lines,
        "size_lines": size_lines,
        "memory": memory_size,
        "duration": duration,
        "clock": clock,
        "when": when,
        "handle": handle,
        "shell": shlex.quote,
        "typeset": lambda line: line.replace("+-", "\N{PLUS-MINUS SIGN}").replace(" - ", " \N{EN DASH} "),
    }
    found.globals.update(version=version("moevolve"), linked=folder is not None)
    return found


def handle(search: SearchRecord | BestRow) -> str:
    """What a search is called in a path: its name, if that can stand there as it is, or its id."""
    name, key = (search.search_name, search.search_id) if isinstance(search, BestRow) else (search.name, search.id)
    return name if _PLAIN.fullmatch(name) else key


def duration(seconds: float) -> str:
    """A time for people."""
    if seconds < 120:
        return f"{seconds:.1f} s"
    minutes, hours = seconds / 60, seconds / 3600
    return f"{minutes:.1f} min" if minutes < 120 else f"{hours:.1f} h"


def clock(seconds: float) -> str:
    """A time that is left, as `h:mm:ss`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def when(moment: datetime | None) -> str | Markup:
    """A time in UTC, for people and for programs."""
    if moment is None:
        return "-"
    stamp = moment.isoformat(timespec="seconds")
    return Markup('<time datetime="{}" title="{} UTC">{}</time>').format(
        stamp, moment.strftime("%Y-%m-%d %H:%M:%S"), moment.strftime("%Y-%m-%d %H:%M")
    )
