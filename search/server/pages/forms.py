"""Forms that ask for a listing: their fields are those of a request, and links keep what was chosen."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar
from urllib.parse import urlencode

from fastapi import Request

from moevolve.search.interface import request as requests

R = TypeVar("R", bound="requests.Request")


def from_form(kind: type[R], **defaults: object) -> Callable[[Request], R]:
    """Return a dependency that makes a request from the path and from the query of a form.

    Args:
        kind: Record of the request.
        defaults: Values of fields that were left empty, where they differ from the record's.
    """

    def made(request: Request) -> R:
        # A form also sends the fields that were left empty.
        given = {**request.query_params, **request.path_params}
        typed = {name: str(given.get(name, "")).strip() for name in requests.fields_of(kind)}
        with requests.one_line_errors():
            return kind(**defaults | {name: text for name, text in typed.items() if text})

    return made


def form_link(path: str, asked: requests.Request, **changes: object) -> str:
    """Return a link to a listing as it was asked for, with some parameters changed; None removes one."""
    chosen = asked.arguments() | changes
    query = urlencode({name: value for name, value in chosen.items() if value not in (None, False)})
    return f"{path}?{query}" if query else path
