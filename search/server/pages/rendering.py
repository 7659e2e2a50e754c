"""Answers made of templates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fastapi import Request
from fastapi.responses import HTMLResponse

from moevolve.search.report.rendering import environment
from moevolve.search.server.guard import COOKIE

FOLDER = Path(__file__).parent
_TEMPLATES = FOLDER / "templates"


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
        environment(_TEMPLATES)
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
        environment(_TEMPLATES)
        .get_template("sign_in.jinja")
        .render(layout="page.jinja", path="/login", may_write=False, signed_in=False, wrong=wrong, next=asked)
    )


def problem_page(request: Request, status: int, title: str, detail: str) -> HTMLResponse:
    """What a page that can't be shown says instead."""
    return render(request, "problem.jinja", status, title=title, detail=detail)
