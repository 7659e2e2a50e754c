"""Rendering a row of data as a prompt with its accepted answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jinja2
from jinja2 import meta
from jinja2.sandbox import ImmutableSandboxedEnvironment

from moevolve.evaluators.errors import UserError
from moevolve.evaluators.tasks.config import TaskConfig
from moevolve.evaluators.tasks.selection import value_key
from moevolve.evaluators.text_files import Row
from moevolve.evaluators.types import Example


def _no_null(value: object) -> object:
    if value is None:
        raise jinja2.UndefinedError("a value in it is null or absent in this row")
    return value


# Task files can come from others, so templates are sandboxed. An unknown variable is an error, not an empty string.
_ENVIRONMENT = ImmutableSandboxedEnvironment(
    undefined=jinja2.StrictUndefined, keep_trailing_newline=True, finalize=_no_null
)
_Render = Callable[[Row], Any]


class ExampleTemplate:
    """The compiled templates of one task; with `prompts_only`, without answers, references and choices.

    Raises:
        UserError: A template is not valid Jinja2.
    """

    def __init__(self, task: TaskConfig, prompts_only: bool = False) -> None:
        self._task = task
        self._prompts_only = prompts_only
        self._prompt = self._text("prompt", task.prompt)
        self._answer = None if task.answer is None else self._text("answer", task.answer)
        self._references = self._list("references", task.references or ())
        self._choices = self._list("choices", task.choices)
        # With `prompts_only`, rows don't need the columns that only answers use.
        used = meta.find_undeclared_variables(_ENVIRONMENT.parse(task.prompt))
        self._fields = {name: paths for name, paths in task.fields.items() if not prompts_only or name in used}
        self._labels = {name: table for name, table in task.labels.items() if not prompts_only or name in used}

    def example(self, row: Row, place: str) -> Example:
        """Render one row with the turns of its own conversation; `place` is its origin for messages.

        Raises:
            UserError: The row can't be rendered; the message names task file, field and row.
        """
        column, shots, system = self._task.turns, (), ""
        if column is not None:
            system, shots = self._run("turns", lambda variables: _as_turns(variables[column]), row, place)
        variables = self._variables_of(row, place)
        prompt = self._run("prompt", self._prompt, variables, place)
        references, choices = ((), ()) if self._prompts_only else self._answers(variables, place)
        return Example(prompt=prompt, references=references, choices=choices, shots=shots, system=system)

    def _answers(self, variables: Row, place: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the accepted answers, the gold one first, and the choices."""
        references = self._run("references", self._references, variables, place)
        if self._answer is not None:
            references = (self._run("answer", self._answer, variables, place), *references)
        references = tuple(dict.fromkeys(references))
        if not references and not self._task.fitness_kind.needs_references:
            return (), ()
        if not references or not references[0].strip():
            raise self._wrong(f"{place}: the gold answer is empty")
        choices = self._run("choices", self._choices, variables, place)
        if choices and references[0] not in choices:
            shown = ", ".join(map(repr, choices))
            raise self._wrong(f"{place}: the gold answer {references[0]!r} is none of the choices {shown}")
        return references, choices

    def _variables_of(self, row: Row, place: str) -> Row:
        variables = dict(row)
        for name, paths in self._fields.items():
            found = [value for path in paths if (value := _follow(row, path)) is not None]
            if not found:
                raise self._wrong(f"{place}: field fields.{name}: the row has no {' or '.join(paths)}")
            variables[name] = found[0]
        for column, table in self._labels.items():
            key = value_key(variables.get(column))
            if key not in table:
                raise self._wrong(f"{place}: `{column}` is {key!r}, labels.{column} knows: {', '.join(table)}")
            variables[column] = table[key]
        return variables

    def _run(self, name: str, render: _Render, variables: Row, place: str) -> Any:
        try:
            return render(variables)
        except Exception as error:  # noqa: BLE001 - a template can fail in any way Python can
            absent = isinstance(error, jinja2.UndefinedError | KeyError)
            has = f"; the row has: {', '.join(variables)}" if absent else ""
            raise self._wrong(f"field {name}: {place}: {error}{has}") from None

    def _text(self, name: str, source: str) -> _Render:
        try:
            template = _ENVIRONMENT.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise self._wrong(f"field {name}: line {error.lineno} of the template: {error.message}") from None
        return template.render

    def _list(self, name: str, source: str | tuple[str, ...]) -> _Render:
        if isinstance(source, tuple):
            renders = [self._text(name, item) for item in source]
            return lambda variables: tuple(render(variables) for render in renders)
        try:
            expression = _ENVIRONMENT.compile_expression(source, undefined_to_none=False)
        except jinja2.TemplateSyntaxError as error:
            raise self._wrong(f"field {name}: not a Jinja2 expression: {error.message}") from None
        return lambda variables: _as_texts(expression(variables))

    def _wrong(self, what: str) -> UserError:
        return UserError(f"{self._task.origin}: {what}")


def _follow(row: Row, path: str) -> object:
    value: object = row
    for part in path.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def _as_turns(value: Any) -> tuple[str, tuple[tuple[str, str], ...]]:
    """Return the system prompt, which may be empty, and the pairs of user's and assistant's turns."""
    turns = [(turn["role"], turn["content"]) for turn in value or ()]
    system = turns.pop(0)[1] if turns and turns[0][0] == "system" else ""
    questions, answers = turns[::2], turns[1::2]
    if {role for role, _ in questions} - {"user"} or {role for role, _ in answers} - {"assistant"} or len(turns) % 2:
        raise UserError("expected turns of `user` and `assistant` in alternation, after an optional `system`")
    return system, tuple((question, answer) for (_, question), (_, answer) in zip(questions, answers, strict=True))


def _as_texts(value: object) -> tuple[str, ...]:
    if isinstance(value, jinja2.Undefined):
        str(value)  # StrictUndefined raises with the variable's name
    if not isinstance(value, list | tuple) or not all(isinstance(item, str) for item in value):
        raise UserError(f"expected a list of texts, got {value!r:.80}")
    return tuple(value)
