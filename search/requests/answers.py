"""Records that answer requests about models. The store's own records answer most other requests."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from pydantic import computed_field

from moevolve.evaluators.fitness.scoring import Answer
from moevolve.evaluators.types import Split
from moevolve.search.genomes.contract.outline import GenomeOutline
from moevolve.search.loop.scores import interval
from moevolve.search.requests.parameters import SizeUnit
from moevolve.store.pareto import ChartCell, Mark
from moevolve.store.records import BestRow, EvaluationRecord
from moevolve.workers.contract.usage import Usage


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
class OperatorEffect:
    """What came of the individuals that one operator made.

    Attributes:
        individuals: Number of individuals with a score.
        bests: Number of them that were the search's best so far.
        children: Number of them whose parents have scores.
        better: Number of these children that beat all their parents.
        gain, low, high: Mean of child's score less its best parent's, with its 95 % confidence interval; None for fewer
            than two children.
    """

    operator: str
    individuals: int
    bests: int
    children: int = 0
    better: int = 0
    gain: float | None = None
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, slots=True)
class ChoiceEffect:
    """How far one choice of genomes moved scores: the standard deviation over individuals of its part of the score.

    Attributes:
        choice: What is chosen, such as `experts of layer 3` or `ridge lambda`.
        spread, low, high: Median and 95 % credible interval, as a share of the score's range from 0 to 1.
    """

    choice: str
    spread: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class OptionEffect:
    """What one option of a choice adds to scores, other choices being equal.

    Attributes:
        option: The option, such as `expert 5`, compared with the mean of the choice's options; of a number, an increase
            by two standard deviations, from one below the mean to one above it.
        individuals: Number of individuals that have the option; all of them for a number.
        effect, low, high: Median and 95 % credible interval, in [-1, 1].
    """

    choice: str
    option: str
    individuals: int
    effect: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class GeneRow:
    """The numbers and names that one individual's settings and sizes have, in the order of `Effects.genes`."""

    index: int
    score: float
    values: tuple[float | str | None, ...]


@dataclass(frozen=True, slots=True)
class Effects:
    """What moved the score in a search.

    Attributes:
        individuals: Number of individuals that were looked at: the newest ones with a score.
        predicted: Share of the variance of their scores that a sum over choices predicts for individuals that it wasn't
            fitted to (leave-one-out); None where there is nothing to predict. At 0 or below, choices and options say
            nothing.
        operators: The one with most individuals first.
        choices: The largest effects first.
        options: Those whose effects are farthest from 0 in standard deviations first.
        genes: Names of the settings and sizes of layers that vary. Empty unless asked for.
        rows: Their values. Empty unless asked for.
    """

    search: str
    individuals: int
    predicted: float | None
    operators: tuple[OperatorEffect, ...]
    choices: tuple[ChoiceEffect, ...]
    options: tuple[OptionEffect, ...] = field(repr=False)
    genes: tuple[str, ...] = ()
    rows: tuple[GeneRow, ...] = field(default=(), repr=False)

    @property
    def note(self) -> str:
        """In words, what the effects are worth."""
        if self.predicted is None:
            return "There are too few individuals, or no choices that differ, to tell what mattered."
        share = f"{max(self.predicted, 0):.0%} of the variance of {self.individuals:,} individuals' scores"
        if self.predicted < 0.1:
            return f"A sum over choices predicts {share}: take nothing from the effects of choices and options."
        return (
            f"A sum over choices predicts {share}, each left out of the fit in turn. Individuals are related and were "
            "selected, so this is the most that it may predict of others."
        )


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
class Analysis:
    """How an individual uses its experts.

    Attributes:
        kind: Genome kind of the individual's search.
        task_fingerprint: Fingerprint of the split whose prompts and answers were run.
        before: The full model's usage; None where that has no experts to compare with.
        after: The individual's usage.
    """

    ref: str
    search_id: str
    kind: str
    task: str
    split: str
    task_fingerprint: str
    before: Usage | None = field(repr=False)
    after: Usage = field(repr=False)
    format: Literal["moevolve-analysis/3"] = "moevolve-analysis/3"


@dataclass(frozen=True, slots=True)
class Imported:
    """One stored coefficient file; `ref` is its individual as `SEARCH:INDEX`."""

    ref: str
    path: Path
    experts: int
    groups: int
    summary: str
