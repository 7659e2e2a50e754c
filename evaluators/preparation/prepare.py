"""Render the examples of a task that workers score, with few-shot examples before each prompt."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import replace
from functools import cache

from moevolve.evaluators.errors import UserError
from moevolve.evaluators.tasks.config import Selection, TaskConfig
from moevolve.evaluators.tasks.datasets import Table, load_table
from moevolve.evaluators.tasks.selection import check_disjoint, select_rows, unshared_rows, value_key
from moevolve.evaluators.tasks.templates import ExampleTemplate
from moevolve.evaluators.text_files import Row
from moevolve.evaluators.types import SCORED, SPLITS, Example, PreparedSplit, Split

Shot = tuple[str, str]
_LOG = logging.getLogger(__name__)


class Shots:
    """The few-shot examples of one task; `table` loads a source split by name.

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
        for index in rows:
            row = source.row(index)
            shot = _shot(template.example(row, f"shots, {source.place(index)}"))
            self._by_value.setdefault(self._key(row), []).append(shot)

    def before(self, row: Row, place: str) -> tuple[Shot, ...]:
        """Return the shots of one row; `place` is its origin for messages."""
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


def prepare_split(task: TaskConfig, split: Split) -> PreparedSplit:
    """Load, select and render one split of a task.

    Raises:
        UserError: The task has no such split, its data can't be loaded, a row can't be rendered or scored, or the split
            shares rows with another split of the task.
    """
    return prepare_splits(task, (split,))[split]


def prepare_splits(task: TaskConfig, splits: Iterable[Split] | None = None) -> dict[Split, PreparedSplit]:
    """Load, select and render several splits of a task, by default all; each source split is loaded once.

    Rows of `calibration` need only the columns of the prompt; they have answers if all of them have the columns of
    answers. Rows of `calibration` whose prompt is also in another split or earlier in `calibration` are left out, and
    rows of any split whose prompt is one of the task's shots.

    Returns:
        Split -> prepared split, in the order `calibration`, `search`, `dev`, `test`.

    Raises:
        UserError: See `prepare_split`, or no row of `calibration` is left.
    """
    wanted = tuple(task.splits) if splits is None else tuple(splits)
    for split in wanted:
        if split not in task.splits:
            raise UserError(f"{task.origin}: the task has no `{split}` split; it has: {', '.join(task.splits)}")
    if task.source.lm_eval is not None:
        from moevolve.evaluators.harness.tasks import prepare_harness

        return prepare_harness(task, [split for split in SPLITS if split in wanted])
    reader = _SplitReader(task)
    scored = {split: reader.scored(split) for split in SCORED if split in wanted}
    prepared = {split: task.prepared(split, examples) for split, examples in scored.items()}
    if "calibration" in wanted:
        elsewhere = {_asked(task, example) for examples in scored.values() for example in examples}
        for split in SCORED:
            if split in task.splits and split not in scored:
                elsewhere.update(_asked(task, example) for example in reader.prompts(split))
        examples = reader.calibration()
        kept = unshared_rows([_asked(task, example) for example in examples], elsewhere, task.origin)
        prepared = {"calibration": task.prepared("calibration", tuple(examples[i] for i in kept)), **prepared}
    if task.window is None:  # repeated headings are normal in running text
        _warn_of_repeats(task, prepared)
    return prepared


class _SplitReader:
    """Renders a task's splits, without rows that are shots; each source split is loaded once."""

    def __init__(self, task: TaskConfig) -> None:
        self._task = task
        self._tables = cache(lambda source: load_table(task.source, source))
        self._template = ExampleTemplate(task)
        self._shots = Shots(task, self._tables)

    def scored(self, split: Split) -> tuple[Example, ...]:
        """Render the examples of a split, and check that each can be scored."""
        task, matching = self._task, self._task.matching.build()
        examples = []
        for place, example in self._rendered(split, self._template):
            if problem := task.fitness_kind.problem(example, matching):
                raise UserError(f"{task.origin}: {place}: {problem}")
            examples.append(example)
        return tuple(examples)

    def prompts(self, split: Split) -> list[Example]:
        """Render the prompts of a split, without answers."""
        return [example for _, example in self._rendered(split, ExampleTemplate(self._task, prompts_only=True))]

    def calibration(self) -> list[Example]:
        """Render `calibration`, with answers if every row has them."""
        try:
            return [example for _, example in self._rendered("calibration", self._template)]
        except UserError:
            return self.prompts("calibration")

    def _rendered(self, split: Split, template: ExampleTemplate) -> list[tuple[str, Example]]:
        """Return a split's examples, each after its row's origin for messages."""
        task, source = self._task, self._task.splits[split].source
        table = self._tables(source)
        # `calibration` is left out here, so that it can't affect what is scored.
        names = [name for name in task.splits if name in (split, *SCORED) and task.splits[name].source == source]
        rows = {name: select_rows(table, task.splits[name]) for name in names}
        check_disjoint(rows, f"{task.origin}: {table.name}")
        found = []
        for number, row in zip(rows[split], table.rows(rows[split]), strict=True):
            place = table.place(number)
            example = template.example(row, place)
            found.append((place, replace(example, shots=(*self._shots.before(row, place), *example.shots))))
        left = self._shots.without(found)
        if not left:
            raise UserError(f"{task.origin}: field shots: all rows of `{split}` are shots; take other rows for them")
        if len(left) < len(found):
            _LOG.info("%s: %d rows of `%s` are left out: they are shots", task.origin, len(found) - len(left), split)
        return left


def _asked(task: TaskConfig, example: Example) -> Hashable:
    """Return what identifies a question: in a conversation also its earlier turns, since prompts like `go on` recur."""
    return example.prompt if task.turns is None else (example.system, example.shots, example.prompt)


def _warn_of_repeats(task: TaskConfig, prepared: dict[Split, PreparedSplit]) -> None:
    # Splits share no rows, but different rows can have the same prompt, as in some public data sets.
    owner: dict[Hashable, Split] = {}
    for split, value in prepared.items():
        prompts = {_asked(task, example) for example in value.examples}
        repeats = [prompt for prompt in prompts if prompt in owner]
        if repeats:
            _LOG.warning("%s: %d prompts of `%s` also stand in an earlier split", task.origin, len(repeats), split)
        owner |= dict.fromkeys(prompts, split)
