"""What form a model's answer has: endless repetition, JSON, a call of a tool."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, Literal

_GRAM = 4
_FEWEST_TOKENS = 16
"""Fewest tokens of an answer that can be called a loop."""
_LOOP_RATIO = 0.55
"""Share of different 4-grams of tokens below which an answer is a loop; pruned models that repeat themselves have less.
"""
_VALUE = re.compile(r"[{\[]")
_ARGUMENTS = ("arguments", "parameters")


def is_loop(tokens: Sequence[int]) -> bool:
    """Tell whether an answer repeats itself: too few of its 4-grams of tokens differ."""
    grams = [tuple(tokens[start : start + _GRAM]) for start in range(len(tokens) - _GRAM + 1)]
    return len(tokens) >= _FEWEST_TOKENS and len(set(grams)) < _LOOP_RATIO * len(grams)


def structure_of(answer: str) -> Literal["call", "json"] | None:
    """Tell whether an answer contains a call of a tool, or another JSON object or array; None if it has neither.

    A call is an object with `name`, and `arguments` or `parameters` that are an object. What stands around it, such as
    the marks of a chat template or of a code block, doesn't matter.
    """
    found: Any = None
    for match in _VALUE.finditer(answer):
        try:
            found, _ = json.JSONDecoder().raw_decode(answer, match.start())
        except ValueError:
            continue
        break
    if not found or not isinstance(found, dict | list):
        return None
    first = found[0] if isinstance(found, list) else found
    called = isinstance(first, dict) and isinstance(first.get("name"), str)
    return "call" if called and any(isinstance(first.get(key), dict) for key in _ARGUMENTS) else "json"
