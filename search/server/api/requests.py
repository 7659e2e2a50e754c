"""Routes made from requests."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from inspect import Parameter
from typing import Annotated, Any, get_type_hints

from fastapi import APIRouter, Path, Query
from pydantic import BaseModel, ConfigDict, create_model, model_validator

from moevolve.search.genomes.contract.phases import refuse_flags_as_numbers
from moevolve.search.interface.control import (
    CancelRequest,
    PauseRequest,
    ScaleRequest,
    StopRequest,
)
from moevolve.search.interface.individuals import GenomeRequest, LineageRequest, ShowRequest
from moevolve.search.interface.rankings import BestRequest, ParetoRequest
from moevolve.search.interface.request import (
    Request,
    annotation_of,
    default_of,
    fields_of,
    function_for,
    option_names,
)
from moevolve.search.interface.searches import (
    CompareRequest,
    EffectsRequest,
    FinalTableRequest,
    OverviewRequest,
    SearchesRequest,
)
from moevolve.search.server.dependencies import CHANGES, ServerDep, ServerState
from moevolve.search.server.problems import READS, WRITES
from moevolve.store.errors import NotFoundError, NotRunningError

# What a server offers over HTTP; each has a `route`.
REQUESTS: tuple[type[Request], ...] = (
    SearchesRequest,
    OverviewRequest,
    FinalTableRequest,
    CompareRequest,
    EffectsRequest,
    BestRequest,
    ParetoRequest,
    ShowRequest,
    GenomeRequest,
    LineageRequest,
    PauseRequest,
    StopRequest,
    CancelRequest,
    ScaleRequest,
)
_PATH = re.compile(r"{(\w+)}")


def request_routes() -> APIRouter:
    """Make a router with one route for each request that can be made over HTTP."""
    routes = APIRouter()
    for kind in REQUESTS:
        assert kind.route is not None
        changes: dict[str, Any] = {"methods": ["POST"], "responses": WRITES, "dependencies": [CHANGES]}
        routes.add_api_route(
            kind.route,
            _endpoint(kind, _PATH.findall(kind.route)),
            tags=[kind.route.split("/")[1]],
            response_model=get_type_hints(kind.answer)["return"],
            **(changes if kind.writes else {"responses": READS}),
        )
    return routes


def _answer(server: ServerState, request: Any) -> object:
    if isinstance(request, CompareRequest | ParetoRequest):  # they read much, and charts ask for them with each page
        return server.listings.cached(repr(request), partial(request.answer, server.store))
    try:
        return request.answer(server.writer)
    except (NotFoundError, NotRunningError):
        starting = isinstance(request, StopRequest | CancelRequest)
        control = server.processes.stop(server.writer, request.search) if starting else None
        if control is None:
            raise
        return control


def _endpoint(kind: type[Request], in_path: Sequence[str]) -> Callable[..., object]:
    """Make the function from which FastAPI reads a request: parameters in the path, and all others as `asked`."""

    def answer(server: ServerState, asked: BaseModel | None = None, **given: object) -> object:
        return _answer(server, kind(**given | dict(asked or ())))

    parameters: dict[str, object] = {"server": ServerDep}
    for name in in_path:
        field = fields_of(kind)[name]
        parameters[name] = Annotated[annotation_of(field), Path(description=field.description)]
    others = [name for name in fields_of(kind) if name not in in_path]
    if others:
        model = model_of(kind, others)
        parameters["asked"] = model if kind.writes else Annotated[model, Query()]
    named = [Parameter(name, Parameter.KEYWORD_ONLY, annotation=each) for name, each in parameters.items()]
    return function_for(kind, answer, named)


def model_of(kind: type[Request], names: Sequence[str]) -> type[BaseModel]:
    """Return a model of some of a request's parameters, for FastAPI to read from a query or a body."""
    chosen: dict[str, Any] = {name: (annotation_of(fields_of(kind)[name]), fields_of(kind)[name]) for name in names}
    one_of = [{"required": [name], "properties": {name: {"not": {"type": "null"}}}} for name in kind.needs_one]
    schema: Any = {"anyOf": one_of} if one_of else None
    config = ConfigDict(extra="forbid", json_schema_extra=schema)
    refusal: Any = classmethod(refuse_flags_as_numbers)
    validators: Any = {"refusal": model_validator(mode="before")(refusal)}
    return create_model(kind.__name__, __config__=config, __validators__=validators, **chosen)


def options_of(kind: type[Request], asked: object, names: Sequence[str]) -> list[str]:
    """Return the options of the command line for those of a request's parameters that don't have their defaults.

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
