"""Opening stores, asking them, and functions made from requests."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import chain, repeat
from pathlib import Path
from textwrap import fill
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, get_args, get_origin, overload

from pydantic.fields import FieldInfo

from moevolve.evaluators.errors import UserError
from moevolve.search.interface.opening import opened_reader, opened_store
from moevolve.search.interface.request import (
    Answered,
    Request,
    answer_parameters,
    fields_of,
    one_line_errors,
    option_names,
    summary_of,
    verb_of,
)
from moevolve.store.reader import StoreReader
from moevolve.store.repository import Store

P = ParamSpec("P")
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

_STORE = "URL of the store, or an open store, which is left open."


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


def ask(store: str | StoreReader | None, request: Answered[T], **further: Any) -> T:
    """Make any request that a store answers.

    Args:
        store: URL of the store, or an open store, which is left open. Profiles of checkpoint folders alone need none.
        request: A use case of `moevolve.search.interface`.
        further: What its `answer` takes besides, such as `on_stage` of a `ProfileRequest`.

    Raises:
        StoreError: there is no such store, or what the request's record says.
        UserError: what the request's record says.
    """
    return _answer(store, request, **further)


def _answer(store: str | StoreReader | None, request: Any, **further: Any) -> Any:
    kind: type[Request] = type(request)
    first, _ = answer_parameters(kind)
    if kind.opens:
        return request.answer(store, **further)
    if first is None:
        return request.answer(**further)
    if store is None:
        raise UserError("say which store answers this")
    # Requests that write refuse an open store that is for reading only.
    with opened_store(store) if kind.writes else opened_reader(store) as opened:  # type: ignore[arg-type]
        return request.answer(opened, **further)


class _Alone(Protocol[T_co]):
    """A request that needs no store."""

    def answer(self) -> T_co: ...


@overload
def function_of(kind: Callable[P, Answered[T]]) -> Callable[Concatenate[str | StoreReader | None, P], T]: ...
@overload
def function_of(kind: Callable[P, _Alone[T]]) -> Callable[P, T]: ...
def function_of(kind: Any) -> Any:
    """Make the function that asks for a kind of request.

    It takes the store, if the request's `answer` does, the fields of the request's record, and by keyword what `answer`
    takes besides; it is documented by the record. One name may stand for a list of it.
    """
    first, further = answer_parameters(kind)
    stores = 0 if first is None else 1

    fields = fields_of(kind)
    lists = [name for name, field in fields.items() if get_origin(field.annotation) is Sequence]

    def several(name: str, value: Any) -> Any:
        return [value] if name in lists and isinstance(value, str | Path) else value

    def call(*args: Any, **kwargs: Any) -> Any:
        given = {name: kwargs.pop(name) for name in further if name in kwargs}
        listed = map(several, chain(fields, repeat("")), args[stores:])
        with one_line_errors():
            request = kind(*listed, **{name: several(name, value) for name, value in kwargs.items()})
        return _answer(args[0] if stores else None, request, **given)

    given = inspect.signature(kind).parameters.values()
    own = [each.replace(annotation=fields[each.name].annotation) for each in given]
    own += [each.replace(annotation=get_args(each.annotation)[0]) for each in further.values()]
    store = inspect.Parameter("store", inspect.Parameter.POSITIONAL_ONLY, annotation="str | StoreReader")
    about = {"store": _STORE} if stores else {}
    about |= {name: _in_python(field.description or "", fields) for name, field in fields.items()}
    about |= {name: each.annotation.__metadata__[0].description for name, each in further.items()}
    errors = (inspect.getdoc(kind) or "").partition("\n\nRaises:")[2]
    lines = [
        fill(f"{name}: {text}", 110, initial_indent=" " * 4, subsequent_indent=" " * 8) for name, text in about.items()
    ]
    call.__name__ = verb_of(kind)
    call.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [store][:stores] + own, return_annotation=kind.answer.__annotations__["return"]
    )
    call.__doc__ = "\n".join([summary_of(kind), "", "Args:", *lines, "", f"Raises:{errors}"])
    return call


def _in_python(text: str, fields: Mapping[str, FieldInfo]) -> str:
    """Name the parameters in a description as Python does, instead of the options of commands."""
    names = {option: name for name, field in fields.items() for option in option_names(name, field)}

    def parameter(found: re.Match[str]) -> str:
        return f"`{names.get(found[0], found[0].removeprefix('--').replace('-', '_'))}`"

    return re.sub(r"--[a-z][a-z-]*", parameter, text).replace("; repeatable", "")


class Watched(Protocol[P, T_co]):
    """A function that takes more than a request's parameters, which types can't add to `P`."""

    @overload
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T_co: ...
    @overload
    def __call__(self, *args: Any, **kwargs: Any) -> T_co: ...


def watched(function: Callable[P, T]) -> Watched[P, T]:
    """Let type checkers accept what a request's `answer` takes besides, such as an observer."""
    same: Any = function
    return same
