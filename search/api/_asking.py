"""Functions made from requests: each takes the fields of a request's record, most of them after a store."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Concatenate, ForwardRef, ParamSpec, TypeVar, get_args

from moevolve._stores import service_of
from moevolve.evaluators.errors import UserError
from moevolve.search.requests.models import (
    AnalyseRequest,
    AnswersRequest,
    EvaluateRequest,
    ExportRequest,
    ImportEepRequest,
    ProfileRequest,
    PromptsRequest,
)
from moevolve.search.requests.record import Request, fields_of, one_line_errors
from moevolve.search.requests.running import CancelRequest, PauseRequest, ScaleRequest, StopRequest
from moevolve.search.requests.searches import BestRequest, LineageRequest, SearchesRequest, ShowRequest
from moevolve.search.service.use_cases import USE_CASES, use_case_of
from moevolve.store.reader import StoreReader

P = ParamSpec("P")
R = TypeVar("R", bound=Request[Any])
S = TypeVar("S")
T = TypeVar("T")


def ask(store: str | StoreReader | None, request: Request[T], on_stage: Callable[[str], None] | None = None) -> T:
    """Make any request that a store answers.

    Args:
        store: URL of the store or of the server that answers, or an open store, which is left open. Profiles of
            checkpoint folders alone need none.
        request: Record of `moevolve.search.requests`.
        on_stage: Called with a line about each stage of a `ProfileRequest`.

    Raises:
        StoreError: there is no such store, or what the request's record says.
        UserError: a server is asked for what only works on the store itself, or what the request's record says.
    """
    case = use_case_of(request)
    if case.opens:
        found: T = case.function(store, request, **({} if on_stage is None else {"on_stage": on_stage}))
        return found
    if store is None:
        raise UserError("say which store, or which server, answers this")
    with service_of(store, case.writes) as service:
        return service.ask(request)


def asks(kind: Callable[P, Request[T]]) -> Callable[Concatenate[str | StoreReader | None, P], T]:
    """Make a function that asks for one kind of request, with the signature and documentation of its record."""

    def ask_it(store: str | StoreReader | None, /, *args: P.args, **kwargs: P.kwargs) -> T:
        with one_line_errors():
            request = kind(*args, **kwargs)
        return ask(store, request)

    (answer,) = get_args(kind.__orig_bases__[0])  # type: ignore[attr-defined]
    returns = answer.__forward_arg__ if isinstance(answer, ForwardRef) else answer
    _describe(ask_it, kind, USE_CASES[kind].home.rpartition(":")[2], returns, "str | StoreReader")  # type: ignore[index]
    return ask_it


def takes(kind: Callable[P, R]) -> Callable[[Callable[[R], T]], Callable[P, T]]:
    """Turn a function of a request into one of the request's fields, documented by the request's record."""

    def taking(function: Callable[[R], T]) -> Callable[P, T]:
        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            with one_line_errors():
                request = kind(*args, **kwargs)
            return function(request)

        _describe(call, kind, function.__name__, function.__annotations__["return"])
        return call

    return taking


def takes_store(kind: Callable[P, R]) -> Callable[[Callable[[S, R], T]], Callable[Concatenate[S, P], T]]:
    """Turn a function of a store and a request into one of the store and the request's fields."""

    def taking(function: Callable[[S, R], T]) -> Callable[Concatenate[S, P], T]:
        def call(store: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
            with one_line_errors():
                request = kind(*args, **kwargs)
            return function(store, request)

        _describe(call, kind, function.__name__, function.__annotations__["return"], "str | Store")
        return call

    return taking


def _describe(function: Callable[..., Any], kind: Any, name: str, returns: Any, store: str | None = None) -> None:
    """Give a function the name, signature and docstring that `help` and editors show; `store` annotates the store."""
    fields = fields_of(kind)
    parameters = [
        each.replace(annotation=fields[each.name].annotation) for each in inspect.signature(kind).parameters.values()
    ]
    arguments = {field: (info.description or "") for field, info in fields.items()}
    if store is not None:
        parameters.insert(0, inspect.Parameter("store", inspect.Parameter.POSITIONAL_ONLY, annotation=store))
        arguments = {"store": "URL of the store, or of a server; or an open store, which is left open."} | arguments
    said, _, errors = (inspect.getdoc(kind) or "").partition("\n\nRaises:")
    lines = [f"    {argument}: {text}" for argument, text in arguments.items()]
    function.__name__ = name
    function.__signature__ = inspect.Signature(parameters, return_annotation=returns)  # type: ignore[attr-defined]
    function.__doc__ = "\n".join([said, "", "Args:", *lines, "", f"Raises:{errors}"])


analyse = asks(AnalyseRequest)
answers = asks(AnswersRequest)
evaluate = asks(EvaluateRequest)
export = asks(ExportRequest)
import_eep = asks(ImportEepRequest)
profile = asks(ProfileRequest)
prompts = asks(PromptsRequest)
searches = asks(SearchesRequest)
best = asks(BestRequest)
show = asks(ShowRequest)
lineage = asks(LineageRequest)
pause = asks(PauseRequest)
stop = asks(StopRequest)
cancel = asks(CancelRequest)
scale = asks(ScaleRequest)
