"""Routes made from requests."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from inspect import Parameter
from typing import Annotated, Any

from fastapi import APIRouter, Path, Query, Response
from pydantic import BaseModel, ConfigDict, create_model, model_validator

from moevolve.search.genomes.contract.phases import refuse_flags_as_numbers
from moevolve.search.interface.answers import StoredAnswersRequest
from moevolve.search.interface.control import (
    CancelRequest,
    ControlRequest,
    PauseRequest,
    ScaleRequest,
    SteerRequest,
    StopRequest,
)
from moevolve.search.interface.rankings import BestRequest, ParetoRequest
from moevolve.search.interface.report import PlotRequest, ReportRequest
from moevolve.search.interface.request import (
    Request,
    annotation_of,
    answer_type,
    default_of,
    fields_of,
    option_names,
    path_fields,
    summary_of,
    verb_of,
)
from moevolve.search.interface.results import CompareRequest, EffectsRequest
from moevolve.search.interface.searches import FinalTableRequest, LabelRequest, SearchesRequest, SearchRequest
from moevolve.search.interface.show import GenomeRequest, LineageRequest, OverviewRequest, ShowRequest
from moevolve.search.server.dependencies import CHANGES, ServerDep, ServerState
from moevolve.search.server.guard import DOCUMENT_POLICY
from moevolve.search.server.problems import READS, WRITES
from moevolve.store.errors import NotFoundError, NotRunningError

REQUESTS: tuple[type[Request], ...] = (
    SearchesRequest,
    SearchRequest,
    LabelRequest,
    OverviewRequest,
    ControlRequest,
    FinalTableRequest,
    CompareRequest,
    EffectsRequest,
    BestRequest,
    ParetoRequest,
    ShowRequest,
    GenomeRequest,
    LineageRequest,
    PlotRequest,
    ReportRequest,
    StoredAnswersRequest,
    PauseRequest,
    StopRequest,
    CancelRequest,
    ScaleRequest,
)
"""What a server offers over HTTP; each has a `route`."""
_IMAGE_TYPES = {"svg": "image/svg+xml", "png": "image/png", "pdf": "application/pdf"}
_HTML = "text/html; charset=utf-8"


def request_routes() -> APIRouter:
    """A router with one route for each request that can be made over HTTP."""
    routes = APIRouter()
    for kind in REQUESTS:
        assert kind.route is not None
        answer = answer_type(kind)
        if answer is bytes:
            types = _IMAGE_TYPES.values() if kind is PlotRequest else ["text/html"]
            document = {"content": {one: {} for one in types}, "description": "The document."}
            options: dict[str, Any] = {
                "tags": ["drawings"],
                "responses": READS | {200: document},
                "response_class": Response,
            }
        else:
            options = {
                "tags": [kind.route.split("/")[1]],
                "methods": ["POST" if kind.writes else "GET"],
                "responses": WRITES if kind.writes else READS,
                "dependencies": [CHANGES] if kind.writes else [],
                "response_model": answer,
            }
        routes.add_api_route(kind.route, _endpoint(kind, kind.route, draws=answer is bytes), **options)
    return routes


def _answer(server: ServerState, request: Any) -> Any:
    if isinstance(request, CompareRequest | ParetoRequest):  # they read much, and charts ask for them with each page
        return server.listings.cached(repr(request), partial(request.answer, server.store))
    try:
        return request.answer(server.writer)
    except (NotFoundError, NotRunningError):
        if not isinstance(request, SteerRequest):
            raise
        control = server.processes.steer_starting(server.writer, request.search, request.desired_state)
        if control is None:
            raise
        return control


def _endpoint(kind: type[Request], route: str, draws: bool) -> Callable[..., Any]:
    """A function for FastAPI that makes a request from its parameters and answers it."""

    def made(asked: BaseModel | None = None, **given: Any) -> Request:
        return kind(**given if asked is None else given | dict(asked))

    def answer(server: ServerState, **given: Any) -> Any:
        return _answer(server, made(**given))

    async def draw(server: ServerState, **given: Any) -> Response:
        request = made(**given)
        content = await server.drawings.run(_answer, server, request)
        media = _IMAGE_TYPES[request.form] if isinstance(request, PlotRequest) else _HTML
        return Response(content, media_type=media, headers={"content-security-policy": DOCUMENT_POLICY})

    endpoint: Any = draw if draws else answer
    # FastAPI reads the parameters from the signature.
    endpoint.__signature__ = inspect.Signature(
        [
            Parameter(name, Parameter.KEYWORD_ONLY, annotation=annotation)
            for name, annotation in _parameters(kind, route).items()
        ]
    )
    endpoint.__name__ = verb_of(kind)
    endpoint.__doc__ = summary_of(kind)
    return endpoint


def _parameters(kind: type[Request], route: str) -> dict[str, Any]:
    """Annotations of an endpoint's parameters: those in the path, and all others together as `asked`."""
    in_path = path_fields(route)
    parameters: dict[str, Any] = {"server": ServerDep}
    for name in in_path:
        field = fields_of(kind)[name]
        parameters[name] = Annotated[annotation_of(field), Path(description=field.description)]
    others = [name for name in fields_of(kind) if name not in in_path]
    if others:
        asked = model_of(kind, others)
        parameters["asked"] = asked if kind.writes else Annotated[asked, Query()]
    return parameters


def model_of(kind: type[Request], names: Sequence[str]) -> type[BaseModel]:
    """A model of some of a request's parameters, for FastAPI to read from a query or a body."""
    chosen: dict[str, Any] = {name: (annotation_of(fields_of(kind)[name]), fields_of(kind)[name]) for name in names}
    one_of = [{"required": [name], "properties": {name: {"not": {"type": "null"}}}} for name in kind.needs_one]
    schema: Any = {"anyOf": one_of} if one_of else None
    config = ConfigDict(extra="forbid", json_schema_extra=schema)
    refusal: Any = classmethod(refuse_flags_as_numbers)
    validators: Any = {"refusal": model_validator(mode="before")(refusal)}
    return create_model(kind.__name__, __config__=config, __validators__=validators, **chosen)


def options_of(kind: type[Request], asked: object, names: Sequence[str]) -> list[str]:
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
