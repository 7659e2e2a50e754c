"""Routes made from request records: one for every use case that has an HTTP path."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from inspect import Parameter
from typing import Annotated, Any

from fastapi import APIRouter, Path, Query, Response
from pydantic import BaseModel, ConfigDict, create_model, model_validator

from moevolve.search.genomes.contract.phases import refuse_flags_as_numbers
from moevolve.search.requests.record import Request, annotation_of, default_of, fields_of, option_names, path_fields
from moevolve.search.requests.running import CancelRequest, PauseRequest, StopRequest
from moevolve.search.requests.searches import ContrastRequest, ParetoRequest, PlotRequest
from moevolve.search.server.dependencies import CHANGES, ServerDep, ServerState
from moevolve.search.server.guard import DOCUMENT_POLICY
from moevolve.search.server.problems import READS, WRITES
from moevolve.search.server.starting import steer_starting
from moevolve.search.service.service import LocalService
from moevolve.search.service.use_cases import USE_CASES, UseCase
from moevolve.store.errors import NotFoundError, NotRunningError
from moevolve.store.records import DesiredState

_IMAGE_TYPES = {"svg": "image/svg+xml", "png": "image/png", "pdf": "application/pdf"}
_HTML = "text/html; charset=utf-8"


def request_routes() -> APIRouter:
    """A router with one route for each request that can be made over HTTP."""
    routes = APIRouter()
    for kind, case in USE_CASES.items():
        if case.path is None:
            continue
        if case.answer is bytes:
            types = _IMAGE_TYPES.values() if kind is PlotRequest else ["text/html"]
            document = {"content": {one: {} for one in types}, "description": "The document."}
            options: dict[str, Any] = {
                "tags": ["drawings"],
                "responses": READS | {200: document},
                "response_class": Response,
            }
        else:
            options = {
                "tags": [case.path.split("/")[1]],
                "methods": ["POST" if case.writes else "GET"],
                "responses": WRITES if case.writes else READS,
                "dependencies": [CHANGES] if case.writes else [],
                "response_model": case.answer,
            }
        routes.add_api_route(case.path, _endpoint(kind, case, case.path), **options)
    return routes


_ASKS: dict[type[Request[Any]], DesiredState] = {
    PauseRequest: "paused",
    StopRequest: "stopped",
    CancelRequest: "cancelled",
}
"""What is asked of a search's driver by the requests that also a search without a driver can be asked for."""


def _answer(server: ServerState, request: Request[Any]) -> Any:
    service = LocalService(server.writer, keep_open=True)
    if isinstance(request, ContrastRequest | ParetoRequest):  # they read much, and charts ask for them with each page
        return server.listings.cached(repr(request), partial(service.ask, request))
    try:
        return service.ask(request)
    except (NotFoundError, NotRunningError):
        if not isinstance(request, PauseRequest | StopRequest | CancelRequest):
            raise
        control = steer_starting(server, request.search, _ASKS[type(request)])
        if control is None:
            raise
        return control


def _endpoint(kind: type[Request[Any]], case: UseCase, path: str) -> Callable[..., Any]:
    """A function for FastAPI that makes a request from its parameters and answers it."""

    def made(asked: BaseModel | None = None, **given: Any) -> Request[Any]:
        return kind(**given if asked is None else given | dict(asked))

    def answer(server: ServerState, **given: Any) -> Any:
        return _answer(server, made(**given))

    async def draw(server: ServerState, **given: Any) -> Response:
        request = made(**given)
        content = await server.drawings.run(_answer, server, request)
        media = _IMAGE_TYPES[request.form] if isinstance(request, PlotRequest) else _HTML
        return Response(content, media_type=media, headers={"content-security-policy": DOCUMENT_POLICY})

    endpoint: Any = draw if case.answer is bytes else answer
    # FastAPI reads the parameters from the signature.
    endpoint.__signature__ = inspect.Signature(
        [
            Parameter(name, Parameter.KEYWORD_ONLY, annotation=annotation)
            for name, annotation in _parameters(kind, case, path).items()
        ]
    )
    endpoint.__name__ = case.home.rpartition(":")[2]
    endpoint.__doc__ = (inspect.getdoc(kind) or "").partition("\n\nRaises:")[0]
    return endpoint


def _parameters(kind: type[Request[Any]], case: UseCase, path: str) -> dict[str, Any]:
    """Annotations of an endpoint's parameters: those in the path, and all others together as `asked`."""
    in_path = path_fields(path)
    parameters: dict[str, Any] = {"server": ServerDep}
    for name in in_path:
        field = fields_of(kind)[name]
        parameters[name] = Annotated[annotation_of(field), Path(description=field.description)]
    others = [name for name in fields_of(kind) if name not in in_path]
    if others:
        asked = model_of(kind, others)
        parameters["asked"] = asked if case.writes else Annotated[asked, Query()]
    return parameters


def model_of(kind: type[Request[Any]], names: Sequence[str]) -> type[BaseModel]:
    """A model of some of a request's parameters, for FastAPI to read from a query or a body."""
    chosen: dict[str, Any] = {name: (annotation_of(fields_of(kind)[name]), fields_of(kind)[name]) for name in names}
    one_of = [{"required": [name], "properties": {name: {"not": {"type": "null"}}}} for name in kind.needs_one]
    schema: Any = {"anyOf": one_of} if one_of else None
    config = ConfigDict(extra="forbid", json_schema_extra=schema)
    refusal: Any = classmethod(refuse_flags_as_numbers)
    validators: Any = {"refusal": model_validator(mode="before")(refusal)}
    return create_model(kind.__name__, __config__=config, __validators__=validators, **chosen)


def options_of(kind: type[Request[Any]], asked: object, names: Sequence[str]) -> list[str]:
    """Options of the command line for those of a request's parameters that don't have their defaults.

    Args:
        kind: Record of the request.
        asked: The request, or a model of some of its parameters.
        names: Names of the parameters.
    """
    words: list[str] = []
    for name in names:
        field, value = fields_of(kind)[name], getattr(asked, name)
        option = option_names(name, field)[0]
        if value is True:
            words.append(option)
        elif value != default_of(field, None):
            for each in value if isinstance(value, list | tuple) else [value]:
                words += [option, str(each)]
    return words
