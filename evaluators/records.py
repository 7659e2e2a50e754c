"""How records of all parts of the project show themselves in a line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

# Most characters of a record's line: two lines of a terminal, and one of a notebook.
_LONGEST = 200
_LONGEST_VALUE = 50


def short_repr(record: Any) -> str:
    """Name a record's fields with their values on one line of at most 200 characters.

    Classes use it as `__repr__ = short_repr`. Long values are cut in their middle. Nested records are shown by their
    type and name, long collections and those of records by their length. Fields with `repr=False` are left out.

    Args:
        record: A dataclass or a pydantic model.
    """
    names = [one.name for one in fields(record) if one.repr] if is_dataclass(record) else type(record).model_fields
    line = f"{type(record).__name__}("
    for place, name in enumerate(names):
        part = f"{', ' * (place > 0)}{name}={_shown(getattr(record, name))}"
        if len(line) + len(part) > _LONGEST - len(", ...)"):
            return f"{line}{', ' * (place > 0)}...)"
        line += part
    return f"{line})"


def _shown(value: object) -> str:
    if _is_record(value):
        name = getattr(value, "ref", getattr(value, "name", None))
        return f"{type(value).__name__}({'...' if name is None else repr(name)})"
    if isinstance(value, Mapping):
        return f"<{len(value)} items>" if value else "{}"
    if isinstance(value, tuple | list) and (len(value) > 3 or any(map(_is_record, value))):
        kinds = {type(each).__name__ for each in value}
        return f"<{len(value)} {kinds.pop() if len(kinds) == 1 else 'items'}>"
    text = " ".join(repr(value).split())
    half = _LONGEST_VALUE // 2
    return text if len(text) <= _LONGEST_VALUE else f"{text[:half]}...{text[-half:]}"


def _is_record(value: object) -> bool:
    return is_dataclass(value) or hasattr(type(value), "model_fields")
