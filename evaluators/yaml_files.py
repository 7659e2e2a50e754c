"""Strict reading of YAML files, with errors in one line."""

from __future__ import annotations

import difflib
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from moevolve.evaluators.errors import UserError, first_line
from moevolve.evaluators.text_files import read_lines

# Environment variable that is `refuse` where tasks with a function of their own aren't loaded: on servers, whose
# clients may name tasks.
CODE_VARIABLE = "MOEVOLVE_TASK_CODE"

_UNKNOWN_KEY = "unknown key"


class _TextKeyLoader(yaml.SafeLoader):
    """A safe loader that reads keys as text and rejects repeated keys.

    Otherwise `true`, `1` and `no` as keys of a label table would become bool and int, and `true` and `1` the same key.
    """


def _text_keys(loader: _TextKeyLoader, node: yaml.MappingNode) -> dict[str, object]:
    loader.flatten_mapping(node)
    mapping: dict[str, object] = {}
    for key_node, value_node in node.value:
        if not isinstance(key_node, yaml.ScalarNode):
            raise yaml.constructor.ConstructorError(None, None, "a key must be plain text", key_node.start_mark)
        if key_node.value in mapping:
            raise yaml.constructor.ConstructorError(
                None, None, f"key `{key_node.value}` given twice", key_node.start_mark
            )
        mapping[key_node.value] = loader.construct_object(value_node, deep=True)
    return mapping


_TextKeyLoader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _text_keys)


def read_yaml(path: Path) -> dict[str, Any]:
    """Read a YAML file that contains one mapping.

    Raises:
        UserError: The file is missing, is not UTF-8 or not YAML (with the line), repeats a key, or isn't a mapping.
    """
    try:
        document = yaml.load("\n".join(read_lines(path)), Loader=_TextKeyLoader)  # a SafeLoader
    except yaml.MarkedYAMLError as error:
        line = "" if error.problem_mark is None else f"{error.problem_mark.line + 1}:"
        raise UserError(f"{path}:{line} {error.problem}") from None
    except yaml.YAMLError as error:
        raise UserError(f"{path}: not YAML: {first_line(error)}") from None
    if not isinstance(document, dict):
        raise UserError(f"{path}: expected a mapping of keys to values at the top")
    return document


def refuse_code(where: str) -> None:
    """Refuse a function that a task's file names, if this process loads none; `where` starts the error message."""
    if os.environ.get(CODE_VARIABLE) == "refuse":
        raise UserError(f"{where}: servers don't run programs for others; leave it out")


def explain_validation(error: ValidationError, data: object, known: Collection[str] = ()) -> str:
    """Put pydantic's errors about plain data into one line that names every field once.

    For an unknown key the nearest of the `known` ones beside it is suggested; they are dotted paths.
    """
    findings: dict[str, list[str]] = {}
    for item in error.errors():
        field = _field(item["loc"], data, missing=item["type"] == "missing")
        message = _message(item["type"], item["msg"], item.get("ctx", {}))
        key, unknown, hint = message.partition(f": {_UNKNOWN_KEY}")
        if unknown and key.isidentifier():  # a section says itself which of its keys is meant
            field, message = [*field, key], _UNKNOWN_KEY + hint
        beside = [name.split(".")[-1] for name in known if name.split(".")[:-1] == field[:-1]]
        near = difflib.get_close_matches(field[-1], beside, n=1) if message == _UNKNOWN_KEY else []
        findings.setdefault(".".join(field), []).append(message + (f" (did you mean `{near[0]}`?)" if near else ""))
    # A field of a union type has an error for every member of the union.
    return "; ".join(
        f"{field}: {' or '.join(dict.fromkeys(messages))}" if field else "; ".join(messages)
        for field, messages in findings.items()
    )


def _field(location: tuple[int | str, ...], data: Any, missing: bool) -> list[str]:
    """Return the path in the data of an error's location, without the union members that pydantic adds to it."""
    path: list[str] = []
    node = data
    for place, part in enumerate(location):
        inside = isinstance(node, dict) and part in node
        if inside or (isinstance(node, list | tuple) and isinstance(part, int) and part < len(node)):
            node = node[part]
        elif place < len(location) - 1 or not missing:
            continue
        path.append(str(part))
    return path


def _message(kind: str, message: str, context: Mapping[str, Any]) -> str:
    """Pydantic's message in YAML's terms: lists and mappings instead of tuples and models."""
    match kind:
        case "extra_forbidden" | "unexpected_keyword_argument":
            return _UNKNOWN_KEY
        case "tuple_type":
            return "expected a list, for example [a, b]"
        case "model_type" | "model_attributes_type" | "dict_type" | "dataclass_type":
            return "expected a mapping of settings"
        case "too_short":
            return f"expected {context['min_length']} or more entries"
        case "union_tag_invalid":
            return f"{context['tag']} is unknown; there are {context['expected_tags'].replace(chr(39), '')}"
        case "union_tag_not_found":
            return f"expected a mapping of settings with {context['discriminator'].strip(chr(39))}"
    return message.removeprefix("Value error, ")
