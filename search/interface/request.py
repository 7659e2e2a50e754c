"""How use cases are made: frozen records that hold what is asked for, and answer it.

A use case is a `Request` in a file of this folder. Its fields are the parameters of the Python function, the command
and the HTTP route; a parameter's type, default, range and description are stated there and nowhere else. Positional
fields are arguments of commands, the others are options. Its method `answer` does the work and returns records. What
`answer` takes says what it needs:

- `store`, an open store; with `opens` it may also be a URL or None. Without it, the request needs no store.
- Further parameters by keyword, such as an observer, which are no part of the request. Python functions have them, too.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Annotated, Any, ClassVar, Protocol, TypeVar, dataclass_transform, get_type_hints

from pydantic import ConfigDict, Field, ValidationError
from pydantic.dataclasses import dataclass as pydantic_dataclass
from pydantic.fields import FieldInfo

from moevolve.evaluators.errors import UserError

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
R = TypeVar("R", bound="Request")


class Request:
    """A request, and how it is answered.

    Attributes:
        route: HTTP path under /api, with the request's positional fields in braces; None where the answer needs
            something that servers don't offer, such as the model.
        writes: True if the answer needs a store that it can write to. Its route is a POST.
        opens: True if the answer opens the store itself, from a URL or an open store.
        needs_one: Names of parameters of which at least one must be given, where none of them is required by itself.
    """

    route: ClassVar[str | None] = None
    writes: ClassVar[bool] = False
    opens: ClassVar[bool] = False
    needs_one: ClassVar[tuple[str, ...]] = ()

    def arguments(self) -> dict[str, Any]:
        """The parameters by name, to be passed on as keyword arguments."""
        return {name: getattr(self, name) for name in fields_of(type(self))}


class Answered(Protocol[T_co]):
    """A request that is answered with a `T_co`."""

    def answer(self, store: Any, /) -> T_co: ...


@dataclass(frozen=True, slots=True)
class Flag:
    """How the command line spells a parameter, where the parameter's own name and type don't do.

    Attributes:
        name: Name of the option with its dashes, several separated by blanks. None derives it from the parameter.
        metavar: Placeholder for the value in `--help`.
        kind: Type that typer parses, where it can't handle the parameter's own.
        variables: Environment variables that give a default.
    """

    name: str | None = None
    metavar: str | None = None
    kind: Any = None
    variables: tuple[str, ...] = ()


def about(description: str, **limits: Any) -> Any:
    """Describe a parameter, for help texts and documentation, with the limits of its values as `Field` takes them."""
    return Field(description=description, **limits)


@dataclass_transform(frozen_default=True, field_specifiers=(Field,))
def record(cls: type[R]) -> type[R]:
    """Make a class a frozen record whose values are checked when it is made."""
    made: Any = pydantic_dataclass(frozen=True, config=ConfigDict(extra="forbid", coerce_numbers_to_str=True))(cls)
    checked: type[R] = made
    return checked


def fields_of(kind: type[Request]) -> Mapping[str, FieldInfo]:
    """The parameters of a request by name, positional ones first."""
    fields: Mapping[str, FieldInfo] = kind.__pydantic_fields__  # type: ignore[attr-defined]
    return dict(sorted(fields.items(), key=lambda item: bool(item[1].kw_only)))


def verb_of(kind: type[Request]) -> str:
    """Name of the function that asks for a request: the record's name in snake case, without `Request`."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", kind.__name__.removesuffix("Request")).lower()


def summary_of(kind: type[Request]) -> str:
    """The documentation of a request without its errors, which are Python's."""
    return (inspect.getdoc(kind) or "").partition("\n\nRaises:")[0]


def answer_type(kind: Any) -> Any:
    """Type of a request's answer. HTTP sends bytes as they are, anything else as JSON."""
    return _hints(kind.answer, ["return"])["return"]


def answer_parameters(kind: Any) -> tuple[str | None, dict[str, inspect.Parameter]]:
    """What `answer` takes: `store` or None, and its further parameters, which have defaults."""
    given = list(inspect.signature(kind.answer).parameters.values())[1:]
    further = {each.name: each for each in given if each.kind is inspect.Parameter.KEYWORD_ONLY}
    hints = _hints(kind.answer, list(further))
    first = next((each.name for each in given if each.name not in further), None)
    return first, {name: each.replace(annotation=hints[name]) for name, each in further.items()}


def _hints(function: Any, names: list[str]) -> dict[str, Any]:
    """The types of some parameters. Others aren't looked up, since they may be imported for type checkers alone."""
    chosen = SimpleNamespace(__annotations__={name: function.__annotations__[name] for name in names})
    return get_type_hints(chosen, function.__globals__, include_extras=True)


def annotation_of(field: FieldInfo) -> Any:
    """A parameter's type with its range."""
    return Annotated[field.annotation, *field.metadata] if field.metadata else field.annotation


def default_of(field: FieldInfo, missing: Any) -> Any:
    """A parameter's default, or `missing` if it has none."""
    return missing if field.is_required() else field.get_default(call_default_factory=True)


def flag_of(field: FieldInfo) -> Flag:
    """How the command line spells a parameter."""
    return next((each for each in field.metadata if isinstance(each, Flag)), Flag())


def option_names(name: str, field: FieldInfo) -> list[str]:
    """A parameter's names as an option, with their dashes, the longest first."""
    return (flag_of(field).name or f"--{name.replace('_', '-')}").split()


def path_fields(path: str) -> list[str]:
    """Names of the parameters that an HTTP path holds as `{name}`."""
    return re.findall(r"{(\w+)}", path)


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Turn pydantic's error about a request's values into an error of one line.

    Raises:
        UserError: names every wrong parameter and says what is wrong with it.
    """
    try:
        yield
    except ValidationError as error:
        faults = (f"{'.'.join(map(str, each['loc'])) or 'request'}: {each['msg']}" for each in error.errors())
        raise UserError("; ".join(faults)) from None
