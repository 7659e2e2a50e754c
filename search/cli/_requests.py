"""Commands from requests: the fields of a request's record become the arguments and options of a command."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import wraps
from inspect import Parameter
from types import UnionType
from typing import Annotated, Any, Concatenate, ParamSpec, TypeVar, Union, get_args, get_origin, get_type_hints

import typer
from annotated_types import Ge
from pydantic.fields import FieldInfo

from moevolve.search.requests import Flag, Request, default_of, fields_of, refused_in_a_line

P = ParamSpec("P")
R = TypeVar("R", bound=Request[Any])


def takes(kind: Callable[..., R], *but: str) -> Callable[[Callable[Concatenate[R, P], None]], Callable[..., None]]:
    """Let a command take what a request takes, and get the request as its first parameter.

    Args:
        kind: the request's record.
        but: fields that the command does without.
    """
    fields = {name: field for name, field in fields_of(kind).items() if name not in but}  # type: ignore[arg-type]

    def taking(command: Callable[Concatenate[R, P], None]) -> Callable[..., None]:
        @wraps(command)
        def run(*_: Any, **given: Any) -> None:
            asked = {name: given.pop(name) for name in fields}
            with refused_in_a_line():
                request = kind(**{name: value for name, value in asked.items() if value is not None})
            command(request, **given)  # type: ignore[call-arg]

        # Typer reads from a command's signature and hints what it takes.
        hints = get_type_hints(command, include_extras=True)
        own = list(inspect.signature(command).parameters.values())[1:]
        run.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [_parameter(name, field) for name, field in fields.items()]
            + [each.replace(annotation=hints[each.name], kind=Parameter.KEYWORD_ONLY) for each in own]
        )
        run.__annotations__ = {name: each.annotation for name, each in inspect.signature(run).parameters.items()}
        run.__doc__ = command.__doc__ or (inspect.getdoc(kind) or "").partition("\n\nRaises:")[0]
        return run

    return taking


def _parameter(name: str, field: FieldInfo) -> Parameter:
    """A field as typer takes it."""
    flag = next((each for each in field.metadata if isinstance(each, Flag)), Flag())
    default = default_of(field, Parameter.empty)
    shown: dict[str, Any] = {"help": field.description, "metavar": flag.metavar}
    # The least is shown; the greatest is only there to keep strangers from asking a server for too much.
    least = next((each.ge for each in field.metadata if isinstance(each, Ge)), None)
    shown |= {} if least is None else {"min": least}
    if field.kw_only:
        names = (flag.name or f"--{name.replace('_', '-')}").split()
        about: Any = typer.Option(*names, **shown)
    else:
        about = typer.Argument(**shown)
    kind = flag.kind or _typed(field.annotation)
    if isinstance(default, tuple):
        kind, default = kind | None, None
    elif default is None and type(None) not in get_args(kind):
        kind = kind | None
    return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, about])


def _typed(annotation: Any) -> Any:
    """What typer is to make of the text that is typed: it knows no sequences but lists, and no ranges within unions."""
    if get_origin(annotation) is Annotated:
        return _typed(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        return Union[tuple(_typed(each) for each in get_args(annotation))]  # noqa: UP007 - made of a tuple
    if get_origin(annotation) in (tuple, Sequence):
        return list[_typed(get_args(annotation)[0])]  # type: ignore[misc]
    return annotation
