"""How requests are made: frozen records whose fields the command line, Python and HTTP read their parameters from.

A parameter's type, default, range and description are stated in its record and nowhere else. Functions of the package
`moevolve` (`search/api/_asking.py`), commands (`search/cli/_requests.py`) and HTTP routes
(`search/server/api/requests.py`) are made from the fields. Positional fields are arguments of commands; the others are
options. `search/service/use_cases.py` says which function answers each request.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Generic, TypeVar, dataclass_transform

from pydantic import ConfigDict, Field, ValidationError
from pydantic.dataclasses import dataclass as pydantic_dataclass
from pydantic.fields import FieldInfo

from moevolve.evaluators.errors import UserError

AnswerT_co = TypeVar("AnswerT_co", covariant=True)
R = TypeVar("R", bound="Request[Any]")


class Request(Generic[AnswerT_co]):
    """A request that is answered by an `AnswerT_co`.

    Attributes:
        needs_one: Names of parameters of which at least one must be given, where none of them is required by itself.
    """

    needs_one: ClassVar[tuple[str, ...]] = ()

    def arguments(self) -> dict[str, Any]:
        """The parameters by name, to be passed on as keyword arguments."""
        return {name: getattr(self, name) for name in fields_of(type(self))}


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
    made: Any = pydantic_dataclass(frozen=True, config=ConfigDict(extra="forbid"))(cls)
    checked: type[R] = made
    return checked


def fields_of(kind: type[Request[Any]]) -> Mapping[str, FieldInfo]:
    """The parameters of a request by name, positional ones first."""
    fields: Mapping[str, FieldInfo] = kind.__pydantic_fields__  # type: ignore[attr-defined]
    return dict(sorted(fields.items(), key=lambda item: bool(item[1].kw_only)))


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
