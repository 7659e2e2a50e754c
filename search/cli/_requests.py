"""Commands from requests: the fields of a request's record become the arguments and options of a command.

Options that most commands have, whatever they ask for, are here too.
"""

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

from moevolve.search.requests.parameters import SERVER_VARIABLE, STORE_VARIABLE
from moevolve.search.requests.record import Request, default_of, fields_of, flag_of, one_line_errors, option_names

DEFAULT_STORE = "sqlite:///moevolve.db"

StoreOption = Annotated[
    str,
    typer.Option(
        "--store",
        "--server",
        envvar=[SERVER_VARIABLE, STORE_VARIABLE],
        help="SQLAlchemy URL of the store, or http(s) URL of a server.",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
CsvOption = Annotated[bool, typer.Option("--csv", help="Print CSV instead of a table.")]


P = ParamSpec("P")
R = TypeVar("R", bound=Request[Any])


def takes(kind: Callable[..., R], *but: str) -> Callable[[Callable[Concatenate[R, P], None]], Callable[..., None]]:
    """Give a command the parameters of a request, and pass it the request as its first argument.

    Args:
        kind: Record of the request.
        but: Names of fields that the command leaves out.
    """
    fields = {name: field for name, field in fields_of(kind).items() if name not in but}  # type: ignore[arg-type]

    def taking(command: Callable[Concatenate[R, P], None]) -> Callable[..., None]:
        @wraps(command)
        def run(*_: Any, **given: Any) -> None:
            asked = {name: given.pop(name) for name in fields}
            with one_line_errors():
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


def option(kind: type[Request[Any]], name: str, more: str = "") -> Any:
    """Make a typer option of one field of a request, for a command that handles it apart.

    Args:
        kind: Record of the request.
        name: Name of the field.
        more: Sentence to add to the help text.
    """
    return _option(name, fields_of(kind)[name], more)


def _parameter(name: str, field: FieldInfo) -> Parameter:
    """Make a command's parameter of a field."""
    flag, default = flag_of(field), default_of(field, Parameter.empty)
    positional = not field.kw_only and flag.name is None
    about = typer.Argument(help=field.description, metavar=flag.metavar) if positional else _option(name, field)
    kind = flag.kind or _typed(field.annotation)
    if isinstance(default, tuple):
        kind, default = kind | None, None
    elif default is None and type(None) not in get_args(kind):
        kind = kind | None
    return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, about])


def _option(name: str, field: FieldInfo, more: str = "") -> Any:
    flag = flag_of(field)
    # Only the least value is shown: upper bounds are there to protect servers.
    least: Any = next((each.ge for each in field.metadata if isinstance(each, Ge)), None)
    return typer.Option(
        *option_names(name, field),
        help=" ".join(filter(None, (field.description, more))),
        metavar=flag.metavar,
        envvar=list(flag.variables) or None,
        min=least,
    )


def _typed(annotation: Any) -> Any:
    """Type that typer can parse: it knows lists only among sequences, and no ranges within unions."""
    if get_origin(annotation) is Annotated:
        return _typed(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        return Union[tuple(_typed(each) for each in get_args(annotation))]  # noqa: UP007 - made of a tuple
    if get_origin(annotation) in (tuple, Sequence):
        return list[_typed(get_args(annotation)[0])]  # type: ignore[misc]
    return annotation
