"""Answers as plain data: what commands print with `--json` is what the HTTP API sends."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import is_dataclass
from functools import cache, singledispatch
from typing import Any

from pydantic import BaseModel, TypeAdapter


@singledispatch
def as_data(value: Any) -> Any:
    """A record, or a collection of them, as what JSON knows: dictionaries, lists, text, numbers, truth values and None.

    What JSON doesn't know (paths, times) becomes text; numbers that aren't finite become None.
    """
    if isinstance(value, Mapping):
        return {str(key): as_data(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [as_data(item) for item in value]
    kind: Any = type(value) if is_dataclass(value) or isinstance(value, BaseModel) else Any
    return _adapter(kind).dump_python(value, mode="json")


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)
