"""Commands from requests: the fields of a request's record become the arguments and options of a command.

Options that most commands have, whatever they ask for, are here too.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from inspect import Parameter
from pathlib import Path
from types import SimpleNamespace, UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import typer
from annotated_types import Ge
from pydantic.fields import FieldInfo

import moevolve
from moevolve.search.cli.output.console import print_json, stages
from moevolve.search.interface.parameters import STORE_VARIABLE
from moevolve.search.interface.request import (
    Request,
    answer_takes,
    default_of,
    fields_of,
    flag_of,
    function_for,
    one_line_errors,
    option_names,
    summary_of,
)

DEFAULT_STORE = "sqlite:///moevolve.db"

# What stands in help for a value of a type.
_PLACEHOLDERS = {Path: "PATH", str: "TEXT", int: "N", float: "NUMBER"}
StoreOption = Annotated[
    str, typer.Option("--store", metavar="URL", envvar=STORE_VARIABLE, help="SQLAlchemy URL of the store.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]

Command = Callable[..., None]
Panels = Mapping[str, Sequence[str]]


def takes(kind: type[Request], *but: str, panels: Panels | None = None) -> Callable[[Command], Command]:
    """Give a command the parameters of a request, and pass it the request as its first argument.

    Args:
        kind: Record of the request.
        but: Names of fields that the command doesn't have.
        panels: Fields in the order of help, in panels by their titles; None for one panel of all options.
    """
    return lambda command: _command(kind, but, command, _options_of(command, 1), command.__doc__, panels)


def shows(kind: type[Request], *but: str) -> Callable[[Command], Command]:
    """Make a command of a function that prints an answer: it asks the store, and can print JSON instead.

    The function takes the answer, the request, and its own options.

    Args:
        kind: Record of the request.
        but: Names of fields that the command doesn't have.
    """

    def showing(show: Command) -> Command:
        def command(request: Any, store: StoreOption = DEFAULT_STORE, as_json: JsonOption = False, **own: Any) -> None:
            found = asked(store, request)
            if as_json:
                print_json(found)
            else:
                show(found, request, **own)

        return _command(kind, but, command, [*_options_of(show, 2), *_options_of(command, 1)[:2]])

    return showing


def asked(store: str | None, request: Request) -> Any:
    """Ask for something that takes seconds, and show its progress meanwhile, if it reports any."""
    if not answer_takes(type(request), "observer"):
        return moevolve.ask(store, request)
    with stages() as on_stage:
        return moevolve.ask(store, request, moevolve.Observer(on_stage=on_stage))


def _options_of(function: Command, position: int) -> list[Parameter]:
    """Return the parameters of a function from a position on, which are options of its command."""
    found = list(inspect.signature(function).parameters.values())[position:]
    # Only these types are looked up: those of answers would load what they are made with.
    own = SimpleNamespace(__annotations__={each.name: each.annotation for each in found})
    hints = get_type_hints(own, function.__globals__, include_extras=True)
    return [each.replace(annotation=hints[each.name], kind=Parameter.KEYWORD_ONLY) for each in found]


def _command(
    kind: type[Request],
    but: Sequence[str],
    answer: Command,
    options: Sequence[Parameter],
    doc: str | None = None,
    panels: Panels | None = None,
) -> Command:
    """Make a command of a request's fields and further options; it passes the request and those to `answer`."""
    fields = {name: field for name, field in fields_of(kind).items() if name not in but}
    panel_of = {name: panel for panel, names in (panels or {}).items() for name in names}

    def run(**given: object) -> None:
        typed = {name: given.pop(name) for name in fields}
        with one_line_errors():
            request = kind(**{name: value for name, value in typed.items() if value is not None})
        answer(request, **given)

    order = sorted(fields, key=list(panel_of).index if panel_of else list(fields).index)
    parameters = [*(_parameter(name, fields[name], panel_of.get(name)) for name in order), *options]
    # Typer would keep the line breaks of all paragraphs but the first.
    paragraphs = inspect.cleandoc(doc or summary_of(kind)).split("\n\n")
    return function_for(kind, run, parameters, "\n\n".join(each.replace("\n", " ") for each in paragraphs))


def _parameter(name: str, field: FieldInfo, panel: str | None) -> Parameter:
    """Make a command's parameter of a field, in a panel of its help."""
    flag, default = flag_of(field), default_of(field, Parameter.empty)
    positional = not field.kw_only and flag.name is None
    argument = typer.Argument(help=field.description, metavar=flag.metavar, rich_help_panel=panel)
    about = argument if positional else _option(name, field, panel)
    kind = flag.kind or _typed(field.annotation)
    if isinstance(default, tuple):
        kind, default = kind | None, None
    elif default is None and type(None) not in get_args(kind):
        kind = kind | None
    return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, about])


def _option(name: str, field: FieldInfo, panel: str | None) -> object:
    flag = flag_of(field)
    plain = _typed(field.annotation)
    kinds = {each for part in (plain, *get_args(plain)) for each in (part, *get_args(part))}
    # Only the least value is shown: upper bounds are there to protect servers.
    least: Any = next((each.ge for each in field.metadata if isinstance(each, Ge)), None)
    return typer.Option(
        *option_names(name, field),
        help=field.description,
        metavar=flag.metavar or next((word for kind, word in _PLACEHOLDERS.items() if kind in kinds), None),
        envvar=list(flag.variables) or None,
        min=least,
        rich_help_panel=panel,
    )


def _typed(annotation: object) -> Any:
    """Return the type that typer can parse: it knows lists only among sequences, and no ranges within unions."""
    if get_origin(annotation) is Annotated:
        return _typed(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        return Union[tuple(_typed(each) for each in get_args(annotation))]  # noqa: UP007 - made of a tuple
    if get_origin(annotation) in (tuple, Sequence):
        return list[_typed(get_args(annotation)[0])]  # type: ignore[misc]
    return annotation
