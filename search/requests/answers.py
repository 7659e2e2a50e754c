"""Records that answer requests about models. The store's own records answer most other requests."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from pydantic import computed_field

from moevolve.evaluators.fitness.scoring import Answer
from moevolve.evaluators.types import Split
from moevolve.search.genomes.contract.outline import GenomeOutline
from moevolve.search.loop.scores import interval
from moevolve.search.requests.parameters import SizeUnit
from moevolve.store.pareto import ChartCell, Mark
from moevolve.store.records import BestRow, EvaluationRecord


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The score of an individual or of the full model on one split of a task.

    Attributes:
        ref: `SEARCH:INDEX`, or `full`.
        record: What is stored, with per-example outcomes.
    """

    ref: str
    record: EvaluationRecord = field(repr=False)

    @computed_field  # type: ignore[prop-decorator]
    @property
    def score(self) -> float | None:
        """Score in [0, 1]; None for a candidate that failed."""
        return self.record.score

    @computed_field  # type: ignore[prop-decorator]
    @property
    def interval(self) -> tuple[float, float] | None:
        """95 % confidence interval of the score; None for a candidate that failed."""
        return None if self.record.score is None else interval(self.record)


@dataclass(frozen=True, slots=True)
class GenomeView:
    """A genome in columns, beside another one if that was asked for.

    Attributes:
        ref, against: The individuals as SEARCH:INDEX.
        outline, other: What they keep, and their settings.
    """

    ref: str
    outline: GenomeOutline
    against: str | None = None
    other: GenomeOutline | None = None


@dataclass(frozen=True, slots=True)
class Pareto:
    """Scores against sizes.

    Attributes:
        size: What sizes are.
        each: Size of one parameter (with `flops`, of one that a token uses), by which all counts are multiplied.
        front: The configurations that no other one beats, from the smallest on.
        marks: The full model, random individuals and one-shot methods.
        candidates: All candidates, counted in cells of a chart; sizes in parameters. Empty unless asked for.
    """

    task: str
    split: Split
    size: SizeUnit
    each: float
    front: tuple[BestRow, ...]
    marks: tuple[Mark, ...]
    candidates: tuple[ChartCell, ...] = field(default=(), repr=False)

    def size_of(self, model: BestRow | Mark) -> float | None:
        """Size of a model on the chart's axis; None where it isn't known."""
        count = model.active_parameters if self.size == "flops" else model.parameters
        return None if count is None else count * self.each


@dataclass(frozen=True, slots=True)
class TradeOff:
    """An individual that no other one of its search beats on all tasks.

    Attributes:
        ref: The individual as SEARCH:INDEX.
        scores: Scores in [0, 1], in the order of the tasks.
    """

    ref: str
    scores: tuple[float, ...]
    parameters: int | None
    summary: str


@dataclass(frozen=True, slots=True)
class TradeOffs:
    """The Pareto front of a search over its tasks.

    Attributes:
        tasks: Names of the tasks, as configured.
        full: Scores of the full model; None where it isn't evaluated.
        front: The highest score on the first task first.
    """

    split: Split
    tasks: tuple[str, ...]
    full: tuple[float | None, ...]
    front: tuple[TradeOff, ...]


@dataclass(frozen=True, slots=True)
class AnsweredRow:
    """One row of a split, and what models answered.

    Attributes:
        row: Index in the split, from 0.
        prompt: Text of the task, without a chat template.
        references: Accepted answers, the gold one first.
        choices: The closed set of answers; empty where answers are open.
        answers: One for each model, in their order.
    """

    row: int
    prompt: str
    references: tuple[str, ...]
    choices: tuple[str, ...]
    answers: tuple[Answer, ...]


@dataclass(frozen=True, slots=True)
class Answers:
    """What models answered to a task's prompts.

    Attributes:
        fitness: Fitness kind that reads the answers.
        models: `full`, then the individuals.
        examined: Number of rows that were run.
        scores: Score of every model on these rows, in [0, 1].
        rows: The rows that the request selects.
    """

    task: str
    split: str
    fitness: str
    models: tuple[str, ...]
    examined: int
    scores: tuple[float, ...]
    rows: tuple[AnsweredRow, ...] = field(repr=False)


@dataclass(frozen=True, slots=True)
class Outcomes:
    """On which rows of a split two models are right.

    Attributes:
        models: The model that the individual is compared with, and the individual.
        examples: Number of rows of the split.
        counts: Number of rows by what `only` may be.
        found: Number of rows that the request selects, of which `rows` are shown.
        rows: Rows with outcomes and without answers' texts.
        note: Why there are no prompts; empty if there are.
    """

    task: str
    split: Split
    models: tuple[str, str]
    examples: int
    counts: dict[str, int]
    found: int
    rows: tuple[AnsweredRow, ...] = field(repr=False)
    note: str = ""


@dataclass(frozen=True, slots=True)
class AskedRow:
    """One row of a split as the model reads it, special tokens and truncation included.

    Attributes:
        row: Index in the split, from 0.
        prompt: Text before the answer.
        gold: The right answer as it follows the prompt, whose log-probability is taken; empty where there is none.
        choices: Every choice as it follows the prompt; empty where answers are open.
    """

    row: int
    prompt: str
    gold: str
    choices: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Imported:
    """One stored coefficient file; `ref` is its individual as `SEARCH:INDEX`."""

    ref: str
    path: Path
    experts: int
    groups: int
    summary: str
