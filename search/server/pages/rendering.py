"""Templates, and how values are written in them."""

from __future__ import annotations

import re
import shlex
from datetime import datetime
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from fastapi import Request
from fastapi.responses import HTMLResponse
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from moevolve.search.loop.standings import count_text
from moevolve.search.report.page import duration
from moevolve.search.server.guard import COOKIE
from moevolve.store.records import BestRow, SearchRecord

FOLDER = Path(__file__).parent
_PLAIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
"""Names that are the same in a path."""


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(FOLDER / "templates"),
        undefined=StrictUndefined,
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "percent": percent,
        "points": lambda value: f"{100 * value:+.1f}".replace("-", "\N{MINUS SIGN}"),
        "number": lambda value: "-" if value is None else f"{value:,}",
        "size": lambda value: "-" if value is None else count_text(value),
        "duration": duration,
        "clock": clock,
        "when": when,
        "handle": handle,
        "shell": shlex.quote,
        "typeset": lambda line: line.replace("+-", "\N{PLUS-MINUS SIGN}").replace(" - ", " \N{EN DASH} "),
    }
    environment.globals["version"] = version("moevolve")
    return environment


def render(request: Request, template: str, status: int = 200, **context: Any) -> HTMLResponse:
    """A page, or, asked for with `?part=1`, what is within it, to be put into another.

    Args:
        request: which may be of somebody who may only read.
        template: file in `templates/`.
        status: of the answer.
        context: names in the template.
    """
    layout = "part.jinja" if "part" in request.query_params else "page.jinja"
    text = (
        _environment()
        .get_template(template)
        .render(
            layout=layout,
            path=request.url.path,
            may_write=getattr(request.state, "may_write", False),
            signed_in=COOKIE in request.cookies,
            **context,
        )
    )
    return HTMLResponse(text, status)


def sign_in(wrong: bool, asked: str) -> str:
    """The page that asks for a token; `wrong` if one was given that isn't one. It leads to the path `asked`."""
    return (
        _environment()
        .get_template("sign_in.jinja")
        .render(layout="page.jinja", path="/login", may_write=False, signed_in=False, wrong=wrong, next=asked)
    )


def problem_page(request: Request, status: int, title: str, detail: str) -> HTMLResponse:
    """What a page that can't be shown says instead."""
    return render(request, "problem.jinja", status, title=title, detail=detail)


def handle(search: SearchRecord | BestRow) -> str:
    """What a search is called in a path: its name, if that can stand there as it is, or its id."""
    name, key = (search.search_name, search.search_id) if isinstance(search, BestRow) else (search.name, search.id)
    return name if _PLAIN.fullmatch(name) else key


def percent(value: float | None) -> str:
    """A score in [0, 1] as people read it."""
    return "-" if value is None else f"{100 * value:.1f}"


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
