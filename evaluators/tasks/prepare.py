"""From a task's configuration to the rendered examples that workers score."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from functools import cache

from moevolve.evaluators.errors import UserError
from moevolve.evaluators.tasks.config import TaskConfig
from moevolve.evaluators.tasks.datasets import Table, load_table
from moevolve.evaluators.tasks.selection import check_disjoint, select_rows
from moevolve.evaluators.tasks.templates import ExampleTemplate
from moevolve.evaluators.types import SPLITS, Example, PreparedSplit, Split

_LOG = logging.getLogger(__name__)


def prepare_split(task: TaskConfig, split: Split) -> PreparedSplit:
    """Loads, selects and renders one split of a task.

    Raises:
        UserError: the task has no such split, the data can't be had, a row can't be rendered or scored, or the split
            shares rows with another split of the task.
    """
    return prepare_splits(task, (split,))[split]


def prepare_splits(task: TaskConfig, splits: Iterable[Split] | None = None) -> dict[Split, PreparedSplit]:
    """Loads, selects and renders several splits; each source split is loaded once.

    Args:
        task: the task.
        splits: which ones; all that the task has by default.

    Returns:
        Split -> prepared split, in the order `search`, `dev`, `test`.

    Raises:
        UserError: as `prepare_split`.
    """
    wanted = tuple(task.splits) if splits is None else tuple(splits)
    for split in wanted:
        if split not in task.splits:
            raise UserError(f"{task.origin}: there is no `{split}` split; it has: {', '.join(task.splits)}")
    if task.source.lm_eval is not None:
        from moevolve.evaluators.harness.tasks import prepare_harness

        return prepare_harness(task, [split for split in SPLITS if split in wanted])
    tables = cache(lambda source: load_table(task.source, source))
    template = ExampleTemplate(task)
    prepared = {}
    for split in (split for split in SPLITS if split in wanted):
        table = tables(task.splits[split].source)
        template.check_columns(table.columns, table.name)
        prepared[split] = _prepare(task, split, table, template)
    _warn_of_repeats(task, prepared)
    return prepared


def _prepare(task: TaskConfig, split: Split, table: Table, template: ExampleTemplate) -> PreparedSplit:
    source = task.splits[split].source
    rows = {name: select_rows(table, chosen) for name, chosen in task.splits.items() if chosen.source == source}
    check_disjoint(rows, f"{task.origin}: {table.name}")
    examples = tuple(
        _checked(task, template.example(table.row(i), table.place(i)), table.place(i)) for i in rows[split]
    )
    return task.prepared(split, examples)


def _checked(task: TaskConfig, example: Example, place: str) -> Example:
    problem = task.kind.problem(example, task.matching.build())
    if problem:
        raise UserError(f"{task.origin}: {place}: {problem}")
    return example


def _warn_of_repeats(task: TaskConfig, prepared: dict[Split, PreparedSplit]) -> None:
    """Rows are disjoint by now, their contents may still be equal (public data sets do repeat themselves)."""
    owner: dict[str, Split] = {}
    for split, value in prepared.items():
        prompts = {example.prompt for example in value.examples}
        repeats = [prompt for prompt in prompts if prompt in owner]
        if repeats:
            _LOG.warning("%s: %d prompts of `%s` also stand in an earlier split", task.origin, len(repeats), split)
        owner |= dict.fromkeys(prompts, split)
