"""Few-shot examples of a task: prompts with answers, shown before every prompt."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from moevolve.evaluators.errors import UserError
from moevolve.evaluators.tasks.config import Selection, TaskConfig
from moevolve.evaluators.tasks.datasets import Table
from moevolve.evaluators.tasks.selection import select_rows, value_key
from moevolve.evaluators.tasks.templates import ExampleTemplate
from moevolve.evaluators.types import Example

Row = dict[str, Any]
Shot = tuple[str, str]


class Shots:
    """The few-shot examples of one task.

    Args:
        task: The task.
        table: Function that loads a source split by name.

    Raises:
        UserError: Rows can't be loaded or rendered, or there are fewer than requested.
    """

    def __init__(self, task: TaskConfig, table: Callable[[str], Table]) -> None:
        self._origin = task.origin
        self._column: str | None = None
        self._by_value: dict[str, list[Shot]] = {}
        if task.reads_whole_texts or not task.shots:
            return
        template = ExampleTemplate(task)
        if isinstance(task.shots, Selection):
            self._select(template, task.shots, table)
        else:
            rows = enumerate(task.shots, start=1)
            self._by_value[""] = [_shot(template.example(row, f"shots, row {number}")) for number, row in rows]

    def _select(self, template: ExampleTemplate, selection: Selection, table: Callable[[str], Table]) -> None:
        self._column = selection.per
        try:
            source = table(selection.source)
            rows = select_rows(source, selection)
        except UserError as error:
            raise UserError(f"{self._origin}: field shots: {error}") from None
        template.check_columns(source.columns, source.name)
        for index in rows:
            row = source.row(index)
            shot = _shot(template.example(row, f"shots, {source.place(index)}"))
            self._by_value.setdefault(self._key(row), []).append(shot)

    def before(self, row: Row, place: str) -> tuple[Shot, ...]:
        """Return the shots of one row; `place` is its origin for messages.

        Raises:
            UserError: There are no shots for the row's value of the `per` column.
        """
        if not self._by_value:
            return ()
        key = self._key(row)
        if key not in self._by_value:
            raise UserError(f"{self._origin}: {place}: field shots: there are none of {self._column} {key!r}")
        return tuple(self._by_value[key])

    def without(self, examples: Sequence[tuple[str, Example]]) -> list[tuple[str, Example]]:
        """Return the `(place, example)` pairs whose prompts aren't shots."""
        shown = {prompt for shots in self._by_value.values() for prompt, _ in shots}
        return [(place, example) for place, example in examples if example.prompt not in shown]

    def _key(self, row: Row) -> str:
        return "" if self._column is None else value_key(row.get(self._column))


def _shot(example: Example) -> Shot:
    return example.prompt, example.references[0]
