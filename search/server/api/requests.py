"""Routes made from request records: one for every use case that has an HTTP path."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from inspect import Parameter
from typing import Annotated, Any

from fastapi import APIRouter, Path, Query, Response
from pydantic import BaseModel, ConfigDict, create_model

from moevolve.search.requests import PlotRequest, Request, annotation_of, fields_of, path_fields
from moevolve.search.server.dependencies import ServerDep, ServerState
from moevolve.search.server.guard import DOCUMENT_POLICY
from moevolve.search.server.problems import READS, WRITES
from moevolve.search.service.service import LocalService
from moevolve.search.service.use_cases import USE_CASES, UseCase

_IMAGE_TYPES = {"svg": "image/svg+xml", "png": "image/png", "pdf": "application/pdf"}
_HTML = "text/html; charset=utf-8"
_DOCUMENT_HEADERS = {"content-security-policy": DOCUMENT_POLICY}


def request_routes() -> APIRouter:
    """A router with one route for each request that can be made over HTTP."""
    routes = APIRouter()
    for kind, case in USE_CASES.items():
        if case.path is None:
            continue
        if case.answer is bytes:
            types = _IMAGE_TYPES.values() if kind is PlotRequest else ["text/html"]
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
    """A model of the named parameters of a request, for FastAPI to read from a query or a body."""
    chosen: dict[str, Any] = {name: (annotation_of(fields_of(kind)[name]), fields_of(kind)[name]) for name in names}
    one_of = [{"required": [name], "properties": {name: {"not": {"type": "null"}}}} for name in kind.needs_one]
    schema: Any = {"anyOf": one_of} if one_of else None
    config = ConfigDict(extra="forbid", json_schema_extra=schema)
    return create_model(kind.__name__, __config__=config, **chosen)


def _answer(server: ServerState, request: Request[Any]) -> Any:
    return LocalService(server.writer, keep_open=True).ask(request)


async def _draw(server: ServerState, request: Request[Any]) -> Response:
    """Answer with a figure or a report; these are slow, so they wait for their turn."""
    content = await server.drawings.run(_answer, server, request)
    media = _IMAGE_TYPES[request.form] if isinstance(request, PlotRequest) else _HTML
    return Response(content, media_type=media, headers=_DOCUMENT_HEADERS)


def _endpoint(
    kind: type[Request[Any]], path: str, case: UseCase, answered: Callable[[ServerState, Request[Any]], Any]
) -> Callable[..., Any]:
    """A function for FastAPI that makes a request from its parameters and passes it to `answered`."""
    in_path = path_fields(path)
    others = [name for name in fields_of(kind) if name not in in_path]

    def made(asked: BaseModel | None = None, **given: Any) -> Request[Any]:
        return kind(**given if asked is None else given | dict(asked))

    def answer(server: ServerState, **given: Any) -> Any:
        return answered(server, made(**given))

    async def draw(server: ServerState, **given: Any) -> Any:
        return await answered(server, made(**given))

    endpoint: Any = draw if inspect.iscoroutinefunction(answered) else answer

    parameters: dict[str, Any] = {"server": ServerDep}
    for name in in_path:
        field = fields_of(kind)[name]
        parameters[name] = Annotated[annotation_of(field), Path(description=field.description)]
    if others:
        asked = model_of(kind, *others)
        parameters["asked"] = asked if case.writes else Annotated[asked, Query()]
    # FastAPI reads the parameters from the signature.
    endpoint.__signature__ = inspect.Signature(
        [Parameter(name, Parameter.KEYWORD_ONLY, annotation=annotation) for name, annotation in parameters.items()]
    )
    endpoint.__name__ = case.home.rpartition(":")[2]
    endpoint.__doc__ = (inspect.getdoc(kind) or "").partition("\n\nRaises:")[0]
    return endpoint
