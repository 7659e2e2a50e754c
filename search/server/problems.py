"""How errors become answers: a status and one line, never a traceback."""

from __future__ import annotations

import logging
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.responses import Response

from moevolve.evaluators.errors import UserError
from moevolve.search.server.guard import TOO_LARGE, problem
from moevolve.store.errors import (
    LeaseHeldError,
    LeaseLostError,
    NameTakenError,
    NotFoundError,
    NotRunningError,
    StoreError,
)

log = logging.getLogger(__name__)

Page = Callable[[Request, int, str, str], Response]
"""What a page that can't be shown says instead, of a status, its name and one line."""

_STATUS: tuple[tuple[type[Exception], HTTPStatus], ...] = (
    (NotFoundError, HTTPStatus.NOT_FOUND),
    (LeaseHeldError, HTTPStatus.CONFLICT),
    (LeaseLostError, HTTPStatus.CONFLICT),
    (NameTakenError, HTTPStatus.CONFLICT),
    (NotRunningError, HTTPStatus.CONFLICT),
    (StoreError, HTTPStatus.SERVICE_UNAVAILABLE),
    (UserError, HTTPStatus.UNPROCESSABLE_ENTITY),
)
"""The first class that fits decides."""


class Problem(BaseModel):
    """What a request that failed gets: one line."""

    detail: str


def _declared(*statuses: HTTPStatus) -> dict[int | str, dict[str, Any]]:
    # Not as `model`, which a route that answers with text would declare to be text, too.
    content = {"application/json": {"schema": Problem.model_json_schema()}}
    return {status.value: {"content": content, "description": status.phrase} for status in statuses}


READS = _declared(
    HTTPStatus.BAD_REQUEST,
    HTTPStatus.UNAUTHORIZED,
    HTTPStatus.NOT_FOUND,
    HTTPStatus.UNPROCESSABLE_ENTITY,
    HTTPStatus.SERVICE_UNAVAILABLE,
)
"""What a route that reads may answer besides what was asked for."""
WRITES = READS | _declared(HTTPStatus.FORBIDDEN, HTTPStatus.CONFLICT, HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
"""The same of one that changes something."""


def answer_errors(app: FastAPI, page: Page) -> None:
    """Let an application answer all errors with a `Problem`, or a browser that asks for a page with a page."""

    def answered(request: Request, status: int, detail: str) -> Response:
        if not request.url.path.startswith("/api/") and "text/html" in request.headers.get("accept", ""):
            return page(request, status, HTTPStatus(status).phrase.capitalize(), detail)
        return problem(status, detail)

    def known(request: Request, error: Exception) -> Response:
        status = next(status for kind, status in _STATUS if isinstance(error, kind))
        if status != HTTPStatus.SERVICE_UNAVAILABLE:
            return answered(request, status, str(error))
        # What a database says names its place, and what was asked of it.
        log.error("%s %s: %s", request.method, request.url.path, error)
        return answered(request, status, "the store can't be read now; the server's log says why")

    def malformed(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        lines = [f"{'.'.join(map(str, each['loc'][1:])) or each['loc'][0]}: {each['msg']}" for each in error.errors()]
        return answered(request, HTTPStatus.UNPROCESSABLE_ENTITY, "; ".join(lines))

    def refused(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        too_large = error.status_code == HTTPStatus.REQUEST_ENTITY_TOO_LARGE
        answer = answered(request, error.status_code, TOO_LARGE if too_large else str(error.detail))
        answer.headers.update(error.headers or {})
        return answer

    def unknown(request: Request, error: Exception) -> Response:
        log.error("%s %s failed", request.method, request.url.path, exc_info=error)
        return answered(request, HTTPStatus.INTERNAL_SERVER_ERROR, "the server failed; its log says how")

    for kind in (StoreError, UserError):
        app.add_exception_handler(kind, known)
    app.add_exception_handler(RequestValidationError, malformed)
    app.add_exception_handler(HTTPException, refused)
    app.add_exception_handler(Exception, unknown)
