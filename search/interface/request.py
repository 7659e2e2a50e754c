"""How use cases are made: frozen records that hold what is asked for, and answer it.

A use case is a `Request` in a file of this folder. Its fields are the parameters of the Python function, the command
and the HTTP route; a parameter's type, default, range and description are stated there and nowhere else. Positional
fields are arguments of commands, the others are options. Its method `answer` does the work and returns records. What
`answer` takes says what it needs:

- `store`, an open store; with `opens` it may also be a URL or None.
- `observer`, by keyword, is told what happens meanwhile.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import Parameter
from typing import Annotated, Any, ClassVar, TypeVar, dataclass_transform

from pydantic import ConfigDict, Field, ValidationError
from pydantic.dataclasses import dataclass as pydantic_dataclass
from pydantic.fields import FieldInfo

from moevolve.evaluators.errors import UserError, refused_paths

R = TypeVar("R", bound="Request")


class Request:
    """A request, and how it is answered.

    Attributes:
        answer: Method that does the work.
        route: HTTP path under /api, with the request's positional fields in braces; None where the answer needs
            something that servers don't offer, such as the model.
        writes: True if the answer needs a store that it can write to. Its route is a POST.
        opens: True if the answer opens the store itself, from a URL or an open store.
        needs_one: Names of parameters that need at least one value between them, though none is required by itself.
    """

    answer: ClassVar[Any]
    route: ClassVar[str | None] = None
    writes: ClassVar[bool] = False
    opens: ClassVar[bool] = False
    needs_one: ClassVar[tuple[str, ...]] = ()

    def arguments(self) -> dict[str, object]:
        """Return the parameters by name, to be passed on as keyword arguments."""
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
    made: Any = pydantic_dataclass(frozen=True, config=ConfigDict(extra="forbid", coerce_numbers_to_str=True))(cls)
    return made


def fields_of(kind: type[Request]) -> Mapping[str, FieldInfo]:
    """Return the parameters of a request by name, positional ones first."""
    fields: Mapping[str, FieldInfo] = kind.__pydantic_fields__  # type: ignore[attr-defined]
    return dict(sorted(fields.items(), key=lambda item: bool(item[1].kw_only)))


def answer_takes(kind: type[Request], name: str) -> bool:
    """Tell whether the answer to a request takes the parameter `store` or `observer`."""
    return name in inspect.signature(kind.answer).parameters


def summary_of(kind: type[Request]) -> str:
    """Return the documentation of a request without its errors, which are Python's."""
    return (inspect.getdoc(kind) or "").partition("\n\nRaises:")[0]


def function_for(
    kind: type[Request],
    call: Any,
    parameters: Sequence[Parameter],
    doc: str | None = None,
    returns: object = inspect.Signature.empty,
) -> Any:
    """Give a function of any arguments the signature with which Python, typer and FastAPI offer a request.

    Args:
        kind: Record of the request, whose name in snake case and without `Request` becomes the function's.
        call: The function.
        parameters: Its parameters.
        doc: Its documentation; None takes the record's, without errors.
        returns: What it returns, as an annotation.
    """
    call.__name__ = re.sub(r"(?<!^)(?=[A-Z])", "_", kind.__name__.removesuffix("Request")).lower()
    call.__doc__ = summary_of(kind) if doc is None else doc
    call.__signature__ = inspect.Signature(parameters, return_annotation=returns)
    call.__annotations__ = {each.name: each.annotation for each in parameters}
    return call


def annotation_of(field: FieldInfo) -> object:
    """Return a parameter's type with its range."""
    return Annotated[field.annotation, *field.metadata] if field.metadata else field.annotation


def default_of(field: FieldInfo, missing: object) -> Any:
    """Return a parameter's default, or `missing` if it has none."""
    return missing if field.is_required() else field.get_default(call_default_factory=True)


def flag_of(field: FieldInfo) -> Flag:
    """Return how the command line spells a parameter."""
    return next((each for each in field.metadata if isinstance(each, Flag)), Flag())


def option_names(name: str, field: FieldInfo) -> list[str]:
    """Return a parameter's names as an option, with their dashes, the longest first."""
    return (flag_of(field).name or f"--{name.replace('_', '-')}").split()


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Turn pydantic's error about a request's values into an error of one line, and the system's about a path.

    Raises:
        UserError: names every wrong parameter and says what is wrong with it.
    """
    try:
        with refused_paths():
            yield
    except ValidationError as error:
        faults = (f"{'.'.join(map(str, each['loc'])) or 'request'}: {each['msg']}" for each in error.errors())
        raise UserError("; ".join(faults)) from None
