"""Opening stores, and functions made from requests: each takes the fields of a request's record, most after a store."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Concatenate, ForwardRef, ParamSpec, TypeVar, get_args

from moevolve.evaluators.errors import UserError
from moevolve.search.operations.opening import is_server, refuse_server
from moevolve.search.requests import models, recipes, running
from moevolve.search.requests import searches as lookups
from moevolve.search.requests.record import Request, fields_of, one_line_errors
from moevolve.search.service.service import LocalService, Service
from moevolve.search.service.use_cases import USE_CASES
from moevolve.store.reader import StoreReader
from moevolve.store.repository import Store

P = ParamSpec("P")
R = TypeVar("R", bound=Request[Any])
S = TypeVar("S")
T = TypeVar("T")


def open_store(url: str, *, create: bool = False) -> Store:
    """Open a store; use it as a context manager, or call `close()`.

    Args:
        url: SQLAlchemy URL: `sqlite:///file.db`, `postgresql://user@host/name`.
        create: Make the store if it doesn't exist.

    Raises:
        StoreError: the store can't be opened; the message says why.
        UserError: the URL is a server's.
    """
    refuse_server(url)
    return Store.open(url, create)


def open_reader(url: str) -> StoreReader:
    """Open a store only to read, also while others write to it; use it as a context manager, or call `close()`.

    The file of a SQLite store may be in a folder that can't be written to.

    Raises:
        StoreError: the store can't be opened; the message says why.
        UserError: the URL is a server's.
    """
    refuse_server(url)
    return StoreReader.open(url)


def service_of(store: str | StoreReader, writes: bool = False) -> AbstractContextManager[Service]:
    """Make the service of an open store, which stays open, or of the URL of a store, to be written to, or a server."""
    if not isinstance(store, str):
        return LocalService(store, keep_open=True)
    if is_server(store):
        from moevolve.search.server.client import RemoteService

        return RemoteService(store)
    return LocalService(open_store(store) if writes else open_reader(store))


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
    case = USE_CASES[type(request)]
    if case.opens:
        found: T = case.function(store, request, **({} if on_stage is None else {"on_stage": on_stage}))
        return found
    if store is None:
        raise UserError("say which store, or which server, answers this")
    with service_of(store, case.writes) as service:
        return service.ask(request)


def asks(kind: Callable[P, Request[T]]) -> Callable[Concatenate[str | StoreReader | None, P], T]:
    """Make a function that asks for one kind of request, with the signature and documentation of its record."""
    (answer,) = get_args(kind.__orig_bases__[0])  # type: ignore[attr-defined]
    returns = answer.__forward_arg__ if isinstance(answer, ForwardRef) else answer
    name = USE_CASES[kind].home.rpartition(":")[2]  # type: ignore[index]
    return _function_of(kind, ask, name, returns, "str | StoreReader")


def takes(kind: Callable[P, R]) -> Callable[[Callable[[R], T]], Callable[P, T]]:
    """Turn a function of a request into one of the request's fields, documented by the request's record."""
    return lambda function: _function_of(kind, function, function.__name__, function.__annotations__["return"])


def takes_store(kind: Callable[P, R]) -> Callable[[Callable[[S, R], T]], Callable[Concatenate[S, P], T]]:
    """Turn a function of a store and a request into one of the store and the request's fields."""
    return lambda function: _function_of(
        kind, function, function.__name__, function.__annotations__["return"], function.__annotations__["store"]
    )


def _function_of(kind: Any, respond: Callable[..., T], name: str, returns: Any, store: str | None = None) -> Any:
    """Make a function of a request's fields that makes the request and has it answered.

    Args:
        kind: Record of the request.
        respond: Takes the store, if there is one, and the request.
        name: Name of the function, as `help` and editors show it.
        returns: Annotation of the answer.
        store: Annotation of the store that the function takes first; None for functions that take none.
    """
    stores = 0 if store is None else 1

    def call(*args: Any, **kwargs: Any) -> T:
        with one_line_errors():
            request = kind(*args[stores:], **kwargs)
        return respond(*args[:stores], request)

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
    call.__name__ = name
    call.__signature__ = inspect.Signature(parameters, return_annotation=returns)  # type: ignore[attr-defined]
    call.__doc__ = "\n".join([said, "", "Args:", *lines, "", f"Raises:{errors}"])
    return call


analyse = asks(models.AnalyseRequest)
answers = asks(models.AnswersRequest)
evaluate = asks(models.EvaluateRequest)
export = asks(models.ExportRequest)
import_eep = asks(models.ImportEepRequest)
outcomes = asks(models.OutcomesRequest)
profile = asks(models.ProfileRequest)
prompts = asks(models.PromptsRequest)
recipe = asks(recipes.RecipeRequest)
searches = asks(lookups.SearchesRequest)
best = asks(lookups.BestRequest)
show = asks(lookups.ShowRequest)
lineage = asks(lookups.LineageRequest)
pause = asks(running.PauseRequest)
stop = asks(running.StopRequest)
cancel = asks(running.CancelRequest)
scale = asks(running.ScaleRequest)
label = asks(lookups.LabelRequest)
genome = asks(lookups.GenomeRequest)
contrast = asks(lookups.ContrastRequest)
effects = asks(lookups.EffectsRequest)
pareto = asks(lookups.ParetoRequest)
tradeoffs = asks(lookups.TradeOffsRequest)
