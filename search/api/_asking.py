"""Requests as functions: each takes a store, or the URL of a server, and then the fields of the request's record."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Concatenate, ForwardRef, ParamSpec, TypeVar, get_args

from moevolve._arguments import service_of
from moevolve.evaluators.errors import UserError
from moevolve.search.requests import (
    AnalyseRequest,
    AnswersRequest,
    BestRequest,
    CancelRequest,
    EvaluateRequest,
    ExportRequest,
    ImportEepRequest,
    LineageRequest,
    PauseRequest,
    ProfileRequest,
    PromptsRequest,
    Request,
    ScaleRequest,
    SearchesRequest,
    ShowRequest,
    StopRequest,
    fields_of,
    refused_in_a_line,
)
from moevolve.search.service.use_cases import USE_CASES, use_case_of
from moevolve.store.reader import StoreReader

P = ParamSpec("P")
T = TypeVar("T")


def ask(store: str | StoreReader | None, request: Request[T], on_stage: Callable[[str], None] | None = None) -> T:
    """Make a request, whatever it is for.

    Args:
        store: URL of the store or of the server that answers it, or an open store, which is left open. Profiles of
            folders alone need none.
        request: one of `moevolve.search.requests`.
        on_stage: told what happens meanwhile, for a `ProfileRequest`.

    Raises:
        StoreError: there is no such store, or what the request's record says.
        UserError: a server is asked for what needs the store itself, or what the request's record says.
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
    """The function that makes requests of a kind, with the signature and the documentation of its record."""

    def ask_it(store: str | StoreReader | None, /, *args: P.args, **kwargs: P.kwargs) -> T:
        with refused_in_a_line():
            request = kind(*args, **kwargs)
        return ask(store, request)

    described(ask_it, kind)
    return ask_it


def described(function: Callable[..., Any], kind: Any) -> None:
    """Let a function show what a request's record takes: to `help`, and to whoever inspects it."""
    function.__name__ = USE_CASES[kind].home.rpartition(":")[2]
    first = inspect.Parameter("store", inspect.Parameter.POSITIONAL_ONLY, annotation="str | StoreReader")
    others = inspect.signature(kind).parameters.values()
    (answer,) = get_args(kind.__orig_bases__[0])
    returns = answer.__forward_arg__ if isinstance(answer, ForwardRef) else answer
    function.__signature__ = inspect.Signature([first, *others], return_annotation=returns)  # type: ignore[attr-defined]
    arguments = {"store": "URL of the store, or of a server; or an open store, which is left open."}
    arguments |= {name: field.description or "" for name, field in fields_of(kind).items()}
    said, _, errors = (inspect.getdoc(kind) or "").partition("\n\nRaises:")
    lines = [f"    {name}: {text}" for name, text in arguments.items()]
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
