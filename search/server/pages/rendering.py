"""Pages rendered from templates."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from fastapi import APIRouter, Request, Response
from fastapi.responses import HTMLResponse

from moevolve.search.drawing import to_svg
from moevolve.search.report.rendering import environment
from moevolve.search.server.guard import COOKIE, DOCUMENT_POLICY

if TYPE_CHECKING:
    from moevolve.search.drawing import Figure

FOLDER = Path(__file__).parent
_TEMPLATES = FOLDER / "templates"
_STYLE = (
    "<style>svg { color: #16191d; --figure-blue: #0072b2; } @media (prefers-color-scheme: dark) "
    "{ svg { color: #e7eaee; --figure-blue: #56b4e9; } }</style>"
)

routes = APIRouter(include_in_schema=False)


def render(request: Request, template: str, status: int = 200, /, **context: object) -> HTMLResponse:
    """Render a page, or for `?part=1` only its contents, to be inserted into another page.

    Args:
        request: The request, on whose token it depends which buttons are enabled.
        template: Name of a file in `templates/`.
        context: Variables of the template.
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


def render_part(request: Request, part: str, what: str, subject: str, here: str, **context: object) -> HTMLResponse:
    """Render `PART_part.jinja` under a heading of a few words that end with a link to the page of its subject."""
    name = f"{part}_part.jinja"
    return render(request, "part_page.jinja", part=name, what=what, subject=subject, here=here, **context)


def svg_document(figure: Figure, description: str) -> Response:
    """An SVG document that follows the reader's light or dark colour scheme; screen readers read the description."""
    opening, rest = to_svg(figure, "figure", description).split(">", 1)
    return Response(
        f"{opening}>{_STYLE}{rest}",
        media_type="image/svg+xml",
        headers={"content-security-policy": DOCUMENT_POLICY},
    )


def sign_in(wrong: bool, next_path: str) -> str:
    """Return the sign-in page, also after a wrong token was entered, which leads to a path."""
    return (
        environment(_TEMPLATES)
        .get_template("sign_in.jinja")
        .render(layout="page.jinja", path="/login", may_write=False, signed_in=False, wrong=wrong, next=next_path)
    )


@routes.get("/login")
def ask_for_token() -> HTMLResponse:
    """Return the sign-in page; the guard handles its form."""
    return HTMLResponse(sign_in(False, "/"))


def problem_page(request: Request, status: int, title: str, detail: str) -> HTMLResponse:
    """Return the page that is shown in place of one that failed."""
    return render(request, "problem.jinja", status, title=title, detail=detail)
