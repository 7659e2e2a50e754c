"""Error responses: a status and one line, never a traceback."""

from __future__ import annotations

import logging
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.body_limit import MAX_BODY_SIZE_SCOPE_KEY
from starlette.responses import Response

from moevolve.evaluators.errors import UserError, path_fault
from moevolve.search.server.guard import problem, too_large
from moevolve.search.server.processes import RETRY_S, BusyError
from moevolve.store.errors import (
    DamagedError,
    LeaseHeldError,
    LeaseLostError,
    NameTakenError,
    NotFoundError,
    NotRunningError,
    StoreError,
)

log = logging.getLogger(__name__)

# Makes an error page from the request, the status code, a title and one line of detail.
ErrorPage = Callable[[Request, int, str, str], Response]

# Status by classes of errors; the first that match count.
_STATUS: tuple[tuple[tuple[type[Exception], ...], HTTPStatus], ...] = (
    ((NotFoundError,), HTTPStatus.NOT_FOUND),
    ((LeaseHeldError, LeaseLostError, NameTakenError, NotRunningError, BusyError), HTTPStatus.CONFLICT),
    ((StoreError,), HTTPStatus.SERVICE_UNAVAILABLE),
    ((UserError,), HTTPStatus.UNPROCESSABLE_ENTITY),
)


def _declared(*statuses: HTTPStatus) -> dict[int | str, dict[str, Any]]:
    # `model` isn't given, because a route that returns text would declare it as text.
    schema = {"type": "object", "properties": {"detail": {"type": "string"}}, "required": ["detail"]}
    content = {"application/json": {"schema": schema}}
    return {status.value: {"content": content, "description": status.phrase} for status in statuses}


# Error responses of a route that reads, for the OpenAPI description.
READS = _declared(
    HTTPStatus.BAD_REQUEST,
    HTTPStatus.UNAUTHORIZED,
    HTTPStatus.NOT_FOUND,
    HTTPStatus.UNPROCESSABLE_ENTITY,
    HTTPStatus.SERVICE_UNAVAILABLE,
)
# Error responses of a route that changes something.
WRITES = READS | _declared(HTTPStatus.FORBIDDEN, HTTPStatus.CONFLICT, HTTPStatus.REQUEST_ENTITY_TOO_LARGE)


def answer_errors(app: FastAPI, page: ErrorPage) -> None:
    """Install error handlers: `page` for browsers that request a page, JSON with one line for all others."""

    def answered(request: Request, status: int, detail: str) -> Response:
        if not request.url.path.startswith("/api/") and "text/html" in request.headers.get("accept", ""):
            wrong = status == HTTPStatus.UNPROCESSABLE_ENTITY  # whose phrase only programmers know
            return page(request, status, "Not possible" if wrong else HTTPStatus(status).phrase.capitalize(), detail)
        return problem(status, detail)

    def known(request: Request, error: Exception) -> Response:
        status = next(status for kinds, status in _STATUS if isinstance(error, kinds))
        if status != HTTPStatus.SERVICE_UNAVAILABLE or isinstance(error, DamagedError):
            answer = answered(request, status, str(error))
            if isinstance(error, BusyError):
                answer.headers["retry-after"] = str(RETRY_S)
            return answer
        # A database's message may contain its address and the query.
        log.error("%s %s: %s", request.method, request.url.path, error)
        return answered(request, status, "the store can't be read now; the server's log says why")

    def malformed(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        # The first part of a location is `query`, `path` or `body`.
        faults = (
            f"{'.'.join(map(str, each['loc'][1:] or each['loc'])) or 'request'}: {each['msg']}"
            for each in error.errors()
        )
        return answered(request, HTTPStatus.UNPROCESSABLE_ENTITY, "; ".join(faults))

    def refused(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        is_large = error.status_code == HTTPStatus.REQUEST_ENTITY_TOO_LARGE
        detail = too_large(request.scope[MAX_BODY_SIZE_SCOPE_KEY]) if is_large else str(error.detail)
        answer = answered(request, error.status_code, detail)
        answer.headers.update(error.headers or {})
        return answer

    def unknown(request: Request, error: Exception) -> Response:
        log.error("%s %s failed", request.method, request.url.path, exc_info=error)
        fault = path_fault(error)
        status = HTTPStatus.INTERNAL_SERVER_ERROR if fault is None else HTTPStatus.UNPROCESSABLE_ENTITY
        return answered(request, status, fault or "the server failed; its log says how")

    for kind in (StoreError, UserError):
        app.add_exception_handler(kind, known)
    app.add_exception_handler(RequestValidationError, malformed)
    app.add_exception_handler(HTTPException, refused)
    app.add_exception_handler(OSError, unknown)
    app.add_exception_handler(Exception, unknown)
