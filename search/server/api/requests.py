"""Routes for requests: every use case that has an HTTP path gets one, with the parameters of its record."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from inspect import Parameter
from typing import Annotated, Any

from fastapi import APIRouter, Path, Query, Response
from pydantic import BaseModel, ConfigDict, create_model

from moevolve.search.requests.record import Request, annotation_of, fields_of, path_fields
from moevolve.search.requests.searches import PlotRequest
from moevolve.search.server.guard import DOCUMENT_POLICY
from moevolve.search.server.problems import READS, WRITES
from moevolve.search.server.service import Service, ServiceDep
from moevolve.search.service.service import LocalService
from moevolve.search.service.use_cases import USE_CASES, UseCase

_PICTURES = {"svg": "image/svg+xml", "png": "image/png", "pdf": "application/pdf"}
_PAGE = "text/html; charset=utf-8"
_DRAWN_HEADERS = {"content-security-policy": DOCUMENT_POLICY}


def request_routes() -> APIRouter:
    """A route for each request that can be made over HTTP."""
    routes = APIRouter()
    for kind, case in USE_CASES.items():
        if case.path is None:
            continue
        if case.answer is bytes:
            types = _PICTURES.values() if kind is PlotRequest else ["text/html"]
            drawn = {"content": {one: {} for one in types}, "description": "The document."}
            routes.add_api_route(
                case.path,
                _endpoint(kind, case.path, case, _draw),
                tags=["drawings"],
                responses=READS | {200: drawn},
                response_class=Response,
            )
        else:
            routes.add_api_route(
                case.path,
                _endpoint(kind, case.path, case, _answer),
                methods=["POST" if case.writes else "GET"],
                tags=[case.path.split("/")[1]],
                responses=WRITES if case.writes else READS,
                response_model=case.answer,
            )
    return routes


def model_of(kind: type[Request[Any]], *names: str) -> type[BaseModel]:
    """Some of a request's parameters as FastAPI takes them from a query or a body."""
    chosen: dict[str, Any] = {name: (annotation_of(fields_of(kind)[name]), fields_of(kind)[name]) for name in names}
    one_of = [{"required": [name], "properties": {name: {"not": {"type": "null"}}}} for name in kind.needs_one]
    schema: Any = {"anyOf": one_of} if one_of else None
    config = ConfigDict(extra="forbid", json_schema_extra=schema)
    return create_model(kind.__name__, __config__=config, **chosen)


def _answer(service: Service, request: Request[Any]) -> Any:
    return LocalService(service.writer, keep_open=True).ask(request)


async def _draw(service: Service, request: Request[Any]) -> Response:
    """A picture or a page: these take long, and are drawn one at a time."""
    content = await service.drawings.run(_answer, service, request)
    media = _PICTURES[request.form] if isinstance(request, PlotRequest) else _PAGE
    return Response(content, media_type=media, headers=_DRAWN_HEADERS)


def _endpoint(
    kind: type[Request[Any]], path: str, case: UseCase, answered: Callable[[Service, Request[Any]], Any]
) -> Callable[..., Any]:
    """A function that FastAPI makes a route of: it makes the request of the parameters, and answers it."""
    in_path = path_fields(path)
    others = [name for name in fields_of(kind) if name not in in_path]

    def made(asked: BaseModel | None = None, **given: Any) -> Request[Any]:
        return kind(**given if asked is None else given | dict(asked))

    def answer(service: Service, **given: Any) -> Any:
        return answered(service, made(**given))

    async def draw(service: Service, **given: Any) -> Any:
        return await answered(service, made(**given))

    endpoint: Any = draw if inspect.iscoroutinefunction(answered) else answer

    parameters: dict[str, Any] = {"service": ServiceDep}
    for name in in_path:
        field = fields_of(kind)[name]
        parameters[name] = Annotated[annotation_of(field), Path(description=field.description)]
    if others:
        asked = model_of(kind, *others)
        parameters["asked"] = asked if case.writes else Annotated[asked, Query()]
    # FastAPI reads from an endpoint's signature what it takes.
    endpoint.__signature__ = inspect.Signature(
        [Parameter(name, Parameter.KEYWORD_ONLY, annotation=annotation) for name, annotation in parameters.items()]
    )
    endpoint.__name__ = case.home.rpartition(":")[2]
    endpoint.__doc__ = (inspect.getdoc(kind) or "").partition("\n\nRaises:")[0]
    return endpoint
