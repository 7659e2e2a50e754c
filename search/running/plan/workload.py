"""The prompts of a run's splits as numbers of tokens."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from moevolve.evaluators.errors import UserError
from moevolve.evaluators.preparation.prepare import prepare_split
from moevolve.evaluators.tasks.config import TaskConfig
from moevolve.evaluators.types import Split
from moevolve.search.config.run import RunConfig, TaskSection
from moevolve.search.loop.setup import calibration_rows_note
from moevolve.search.running.plan.records import SplitWork
from moevolve.workers.profiling.prompts import PromptCounts, PromptMeter


@dataclass(frozen=True, slots=True)
class Prompts:
    """Lengths that a user gives instead of data.

    Attributes:
        prompt_tokens: Length of every prompt.
        new_tokens: Length of every answer; None takes the task's `max_new_tokens`.
        examples: Number of rows of every split; None takes the task file's.
    """

    prompt_tokens: int
    new_tokens: int | None = None
    examples: int | None = None


class WorkloadReader:
    """Finds the lengths of a run's prompts.

    Args:
        config: The run.
        given: Lengths to use instead of the tasks' data.
        calibrating: True if the run needs calibration rows.
    """

    def __init__(self, config: RunConfig, given: Prompts | None, calibrating: bool) -> None:
        self._config, self._given, self._calibrating = config, given, calibrating

    def splits(self, name: Split) -> tuple[SplitWork, ...]:
        """Measure one split of every task.

        Raises:
            UserError: A task's data can't be read or planned, or neither a tokenizer nor lengths were given.
        """
        return tuple(self._work(task, name) for task in self._config.tasks)

    def held_out(self) -> tuple[SplitWork, ...]:
        """Measure the `test` splits of the held-out tasks."""
        return tuple(self._work(TaskSection(name=name), "test") for name in self._config.final.held_out)

    def calibration_tokens(self) -> int | None:
        """Number of tokens in all calibration rows; None if lengths are given, or no calibration is needed."""
        if self._given is not None or not self._calibrating:
            return None
        rows = [section.prepared("calibration", self._calibrating) for section in self._config.tasks]
        return sum(self._meter.counts(split).tokens for split in rows)

    def set_aside(self) -> tuple[str, ...]:
        """Describe, if the run calibrates, where the rows come from for tasks without a `calibration` split."""
        found = []
        for section in self._config.tasks if self._calibrating else ():
            if section.holds_out_calibration:
                task = section.task(self._calibrating)
                stated, given = task.splits["calibration"].row_count, self._given is not None
                rows = stated if given else len(prepare_split(task, "calibration").examples)
                found.append(calibration_rows_note(task.name, rows))
        return tuple(found)

    def _work(self, section: TaskSection, split: Split) -> SplitWork:
        task = section.task(self._calibrating)
        if task.fitness_kind.reads == "harness":
            raise UserError(f"task {section.name}: tasks of lm-evaluation-harness can't be planned; use another task")
        if self._given is not None:
            found, source = _given(task, split, self._given), "given"
        else:
            prepared = prepare_split(task, split)
            found = self._meter.counts(prepared)
            source = "data, tokenised" + (", in the chat template" if self._meter.wraps(prepared) else "")
        return SplitWork(task.name, split, found.prompts, found.tokens, found.longest, source)

    @cached_property
    def _meter(self) -> PromptMeter:
        try:
            return PromptMeter(self._config.model, self._config.engine)
        except UserError as error:
            raise UserError(f"{error}; say how long prompts are with --prompt-tokens") from None


def _given(task: TaskConfig, split: Split, given: Prompts) -> PromptCounts:
    if split not in task.splits:
        raise UserError(f"{task.origin}: the task has no `{split}` split; it has: {', '.join(task.splits)}")
    rows = task.splits[split]
    count = given.examples or (rows.row_count if task.window is None else None)
    if count is None:
        raise UserError(f"task {task.name}: its file doesn't say how many examples `{split}` has; give --examples")
    length = task.window or given.prompt_tokens + (given.new_tokens or task.max_new_tokens)
    return PromptCounts(count, count * length, length)
