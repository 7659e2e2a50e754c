"""Opening stores, asking them, and functions made from requests."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Sequence
from inspect import Parameter
from pathlib import Path
from textwrap import fill
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, get_origin, overload

from moevolve.evaluators.errors import UserError, refused_paths
from moevolve.search.interface.opening import opened_reader, opened_store
from moevolve.search.interface.progress import line_observer
from moevolve.search.interface.request import (
    Request,
    answer_takes,
    fields_of,
    function_for,
    one_line_errors,
    summary_of,
)
from moevolve.search.running.observer import Observer
from moevolve.search.text import plain
from moevolve.store.reader import StoreReader
from moevolve.store.repository import Store

P = ParamSpec("P")
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

_STORE = "URL of the store; or an open store, which is left open."
_OBSERVER = "Its callbacks are called with what happens meanwhile."
_PROGRESS = "Show steps and scores on stderr; an observer replaces that."


class Answered(Protocol[T_co]):
    """A request that a store answers with a `T_co`."""

    def answer(self, store: Any, /) -> T_co: ...


class _Alone(Protocol[T_co]):
    """A request that needs no store."""

    def answer(self) -> T_co: ...


def open_store(url: str, *, create: bool = False) -> Store:
    """Open a store; use it as a context manager, or call `close()`.

    Args:
        url: SQLAlchemy URL: `sqlite:///file.db`, `postgresql://user@host/name`.
        create: Make the store if it doesn't exist.

    Raises:
        StoreError: the store can't be opened; the message says why.
    """
    return Store.open(url, create)


def open_reader(url: str) -> StoreReader:
    """Open a store only to read, also while others write to it; use it as a context manager, or call `close()`.

    The file of a SQLite store may be in a folder that can't be written to.

    Raises:
        StoreError: the store can't be opened; the message says why.
    """
    return StoreReader.open(url)


@overload
def ask(store: str | StoreReader | None, request: Answered[T], observer: Observer | None = None) -> T: ...
@overload
def ask(store: None, request: _Alone[T], observer: Observer | None = None) -> T: ...
def ask(store: Any, request: Any, observer: Observer | None = None) -> Any:
    """Make any request.

    Args:
        store: URL of the store that answers, or an open store, which is left open. Some requests need none.
        request: A use case of `moevolve.search.interface`.
        observer: Its callbacks are called with what happens meanwhile.

    Raises:
        StoreError: the store doesn't exist, or what the request's record says.
        UserError: what the request's record says.
    """
    kind: type[Request] = type(request)
    told = {} if observer is None else {"observer": observer}
    with refused_paths():
        if not answer_takes(kind, "store"):
            return request.answer(**told)
        if kind.opens:
            return request.answer(store, **told)
        if store is None:
            raise UserError("say which store answers this")
        # Requests that write refuse an open store that is for reading only.
        with opened_store(store) if kind.writes else opened_reader(store) as opened:
            return request.answer(opened, **told)


@overload
def function_of(kind: Callable[P, Answered[T]]) -> Callable[Concatenate[str | StoreReader | None, P], T]: ...
@overload
def function_of(kind: Callable[P, _Alone[T]]) -> Callable[P, T]: ...
def function_of(kind: Any) -> Any:
    """Make the function that asks for a kind of request.

    It takes the store, if the request's `answer` does, the fields of the request's record, and by keyword an observer,
    if the answer tells one anything. It is documented by the record. One name may stand for a list of it.
    """
    stores, watched = int(answer_takes(kind, "store")), answer_takes(kind, "observer")
    fields, made = fields_of(kind), inspect.signature(kind)
    lists = [name for name, field in fields.items() if get_origin(field.annotation) is Sequence]

    def call(*args: Any, **kwargs: Any) -> Any:
        observer = kwargs.pop("observer", None) if watched else None
        if watched and kwargs.pop("progress", True):
            observer = observer or line_observer(
                lambda line: print(plain(line), file=sys.stderr, flush=True)  # noqa: T201 - what it is for
            )
        given = made.bind(*args[stores:], **kwargs).arguments
        for name in given.keys() & lists:
            given[name] = [given[name]] if isinstance(given[name], str | Path) else given[name]
        with one_line_errors():
            request = kind(**given)
        return ask(args[0] if stores else None, request, observer)

    parameters = [each.replace(annotation=fields[each.name].annotation) for each in made.parameters.values()]
    about = {}
    for name, field in fields.items():
        # Descriptions name the options of commands, and Python names parameters.
        text = re.sub(r"--[a-z][a-z-]*", lambda found: f"`{found[0][2:].replace('-', '_')}`", field.description or "")
        about[name] = text.replace("; repeatable", "")
    if stores:
        parameters.insert(0, Parameter("store", Parameter.POSITIONAL_ONLY, annotation="str | StoreReader"))
        about = {"store": _STORE} | about
    if watched:
        parameters.append(Parameter("observer", Parameter.KEYWORD_ONLY, default=None, annotation="Observer | None"))
        parameters.append(Parameter("progress", Parameter.KEYWORD_ONLY, default=True, annotation="bool"))
        about |= {"observer": _OBSERVER, "progress": _PROGRESS}
    lines = [
        fill(f"{name}: {text}", 110, initial_indent=" " * 4, subsequent_indent=" " * 8) for name, text in about.items()
    ]
    errors = (inspect.getdoc(kind) or "").partition("\n\nRaises:")[2]
    doc = "\n".join([summary_of(kind), "", "Args:", *lines, "", f"Raises:{errors}"])
    return function_for(kind, call, parameters, doc, kind.answer.__annotations__["return"])


def watched(function: Callable[..., T]) -> Callable[..., T]:
    """Let type checkers accept an observer, which types can't add to a record's parameters."""
    return function
