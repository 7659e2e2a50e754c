"""Prompt templates of the demo tasks: the one place they are written; task files and training carry the same text."""

from __future__ import annotations

from collections.abc import Mapping

import jinja2

TEMPLATE = "{{ passage }}\nQuestion: {{ question }}\nAnswer:"
"""Jinja2 source of all tasks; the model reads ``<bos>`` + the rendered text and writes ``" " + answer + <eos>``."""

CHOICES: Mapping[str, tuple[str, ...]] = {"compare": ("Yes", "No"), "relation": ("Yes", "No", "Maybe")}
"""Possible answers of the tasks that have a few; those of the others are free text."""

_ENVIRONMENT = jinja2.Environment(undefined=jinja2.StrictUndefined, keep_trailing_newline=True, autoescape=False)
_COMPILED = _ENVIRONMENT.from_string(TEMPLATE)


def render(row: Mapping[str, str]) -> str:
    """The prompt of one row.

    Raises:
        jinja2.UndefinedError: the row lacks a field of the template.
    """
    return _COMPILED.render(row)
