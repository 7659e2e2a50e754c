"""Requests as forms of pages send them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from fastapi import Request as HttpRequest

from moevolve.search.requests.record import Request, fields_of, one_line_errors

R = TypeVar("R", bound=Request[Any])


def from_form(kind: type[R]) -> Callable[[HttpRequest], R]:
    """Read a request from the query string: a form sends fields that were left empty, too."""

    def read(http: HttpRequest) -> R:
        given = {name: http.query_params.get(name, "").strip() for name in fields_of(kind)}
        with one_line_errors():
            return kind(**{name: text for name, text in given.items() if text})

    return read
