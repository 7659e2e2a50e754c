"""Reading YAML strictly, and saying in one line what is wrong with it."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from moevolve.evaluators.errors import UserError


class _TextKeyLoader(yaml.SafeLoader):
    """Keys are text as written, and a key given twice is an error instead of a silent overwrite.

    `true`, `1` and `no` as keys of a label table would otherwise be read as bool and int, where True == 1 merges two of
    them into one.
    """


def _text_keys(loader: _TextKeyLoader, node: yaml.MappingNode) -> dict[str, Any]:
    loader.flatten_mapping(node)
    mapping: dict[str, Any] = {}
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
    """Reads a YAML file that holds one mapping.

    Raises:
        UserError: no such file, not UTF-8, not YAML (with the line), a repeated key, or not a mapping.
    """
    try:
        document = yaml.load(path.read_text(encoding="utf-8"), Loader=_TextKeyLoader)  # a SafeLoader
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: can't be read: {error}") from None
    except yaml.MarkedYAMLError as error:
        line = "" if error.problem_mark is None else f"{error.problem_mark.line + 1}:"
        raise UserError(f"{path}:{line} {error.problem}") from None
    except yaml.YAMLError as error:
        raise UserError(f"{path}: not YAML: {str(error).splitlines()[0]}") from None
    if not isinstance(document, dict):
        raise UserError(f"{path}: expected a mapping of keys to values at the top")
    return document


def explain_validation(error: ValidationError, model: type[BaseModel]) -> str:
    """One line for a pydantic error: `field a.b: what is wrong`, unknown keys with the nearest known one."""
    parts = []
    for item in error.errors(include_url=False):
        where = ".".join(str(part) for part in item["loc"])
        if item["type"] == "extra_forbidden":
            parts.append(f"unknown key `{where}`{_nearest(str(item['loc'][-1]), model, len(item['loc']) == 1)}")
        elif item["type"] == "missing":
            parts.append(f"field {where}: missing")
        else:
            message = item["msg"].removeprefix("Value error, ")
            message = message[0].lower() + message[1:]
            parts.append(f"field {where}: {message}" if where else message)
    return "; ".join(parts)


def _nearest(key: str, model: type[BaseModel], top: bool) -> str:
    if not top:
        return ""
    near = difflib.get_close_matches(key, model.model_fields, n=1)
    return f" (did you mean `{near[0]}`?)" if near else f"; known keys: {', '.join(model.model_fields)}"
