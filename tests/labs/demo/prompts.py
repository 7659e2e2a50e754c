"""Prompt templates of the demo tasks: the one place they are written; task files and training carry the same text."""

from __future__ import annotations

from collections.abc import Mapping

import jinja2

TEMPLATES: Mapping[str, str] = {
    "entail": "{{ premise }}\nEntailed: {{ hypothesis }}\nA. Yes\nB. No\nAnswer:",
    "sense": "{{ sentence1 }}\n{{ sentence2 }}\nSame meaning of {{ word }}?\nAnswer:",
    "compare": "{{ passage }}\nQuestion: {{ question }}\nAnswer:",
    "relation": "{{ premise }}\n{{ hypothesis }}\nA. Contradiction\nB. Entailment\nC. Neutral\nAnswer:",
    "span": "{{ passage }}\nQuestion: {{ question }}\nAnswer:",
}
"""Jinja2 source per task; the model reads ``<bos>`` + the rendered text and writes ``" " + answer + <eos>``."""

CHOICES: Mapping[str, tuple[str, ...] | None] = {
    "entail": ("A", "B"),
    "sense": ("Yes", "No"),
    "compare": ("Yes", "No"),
    "relation": ("A", "B", "C"),
    "span": None,
}
"""Possible answers per task; None where the answer is free text."""

_ENVIRONMENT = jinja2.Environment(undefined=jinja2.StrictUndefined, keep_trailing_newline=True, autoescape=False)
_COMPILED = {task: _ENVIRONMENT.from_string(source) for task, source in TEMPLATES.items()}


def render(task: str, row: Mapping[str, str]) -> str:
    """The prompt of one row.

    Raises:
        KeyError: the task isn't a demo task.
        jinja2.UndefinedError: the row lacks a field of the template.
    """
    return _COMPILED[task].render(row)
