"""Answers of stored individuals and of full models to any task's prompts, and the prompts as the model reads them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Annotated, Literal

from pydantic import Field

from moevolve.evaluators.errors import CandidateError, UserError
from moevolve.evaluators.fitness.scoring import Answer
from moevolve.evaluators.metrics import scale_of, score
from moevolve.evaluators.records import short_repr
from moevolve.evaluators.scales import ScaleName
from moevolve.search.interface.parameters import (
    IndividualOrFull,
    ModelDevice,
    ModelDtype,
    ModelPath,
    SearchOfFull,
    Task,
    TaskSplit,
    Threads,
)
from moevolve.search.interface.request import Flag, Request, about, record
from moevolve.search.loop.scores import FULL
from moevolve.search.running.candidates import find_candidate, prepared_split
from moevolve.search.running.observer import SILENT, Observer
from moevolve.store.reader import StoreReader
from moevolve.workers.contract.edits import Edit, IdentityEdit
from moevolve.workers.contract.settings import engine_fingerprint

AnswerFilter = Literal["differing", "lost", "gained", "wrong"]
Only = Annotated[
    AnswerFilter | None,
    about(
        "Only rows where an individual answers otherwise than the model it is compared with "
        "(`differing`), scores below (`lost`) or above it (`gained`), or isn't fully right (`wrong`). The whole split "
        "is run then, unless rows are named."
    ),
]


# Which pairs of outcomes, of the full model and of an individual, a filter selects.
_SELECTS: Mapping[AnswerFilter, Callable[[float, float], bool]] = {
    "differing": lambda full, other: other != full,
    "lost": lambda full, other: other < full,
    "gained": lambda full, other: other > full,
    "wrong": lambda full, other: other < 1,
}


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
        scale: Scale that scores and outcomes are shown on.
    """

    __repr__ = short_repr

    task: str
    split: str
    fitness: str
    models: tuple[str, ...]
    examined: int
    scores: tuple[float, ...]
    rows: tuple[AnsweredRow, ...] = field(repr=False)
    scale: ScaleName = "percent"


@record
class AnswersRequest(Request):
    """Show prompts, right answers, and the answers of the full model and of individuals. Nothing is stored.

    Raises:
        UserError: the task or split doesn't exist, individuals belong to different models, or one can't be run.
        StoreError: the store or individual doesn't exist.
    """

    individuals: Annotated[
        Sequence[str],
        about("SEARCH:INDEX of individuals of one model, or `full` alone.", min_length=1),
        Flag(metavar="INDIVIDUAL...|full"),
    ]
    _: KW_ONLY
    task: Task
    split: TaskSplit = "test"
    limit: Annotated[
        int | None,
        about("Show at most this many rows; without --only, no more are run.", ge=1),
    ] = 10
    only: Only = None
    rows: Annotated[
        Sequence[Annotated[int, Field(ge=0)]],
        about("Run these rows of the split, counted from 0, and all of them; repeatable."),
        Flag("--row", "N", list[int]),
    ] = ()
    search: SearchOfFull = None
    model: ModelPath = None
    device: ModelDevice = None
    dtype: ModelDtype = None
    threads: Threads = None

    def answer(self, store: StoreReader, *, observer: Observer = SILENT) -> Answers:
        # Without `only`, no more rows than `limit` are run. Batches then differ from those of the whole split, and so
        # may the last digits of log-probabilities.
        names = [name for name in dict.fromkeys(self.individuals) if name != FULL] or [FULL]
        candidates = {name: find_candidate(store, name, self.search, self.model, tasks=[self.task]) for name in names}
        first = candidates[names[0]]
        same = {
            name: (each.facts.fingerprint, engine_fingerprint(each.config.model, each.config.engine))
            for name, each in candidates.items()
        }
        for name, model in same.items():
            if model != same[names[0]]:
                raise UserError(
                    f"{names[0]} and {name} are of different models, or their engines' settings differ; ask for the "
                    "answers of one model's individuals at a time"
                )
        prepared = prepared_split(first, self.task, self.split)
        if prepared.window is not None:
            raise UserError(f"{prepared.task} is running text, which is read in windows: there are no answers to show")
        places = self._places(len(prepared.examples))
        prepared = prepared.only(places)
        # One resident model, to which the edits are applied one after the other.
        from moevolve.workers.checkpoints.loading import placed
        from moevolve.workers.worker import EvaluationWorker

        observer.on_stage("loading the model")
        engine = first.config.engine if self.threads is None else replace(first.config.engine, threads=self.threads)
        worker = EvaluationWorker(placed(first.config.model, self.device, self.dtype), engine)
        edits: dict[str, Edit] = {FULL: IdentityEdit()} | {name: each.edit for name, each in candidates.items()}
        found: list[tuple[Answer, ...]] = []
        for name, edit in edits.items():
            observer.on_stage(f"{name} answers {len(places):,} rows of {prepared.task} ({prepared.split})")
            try:
                found += worker.answer(edit, prepared)
            except CandidateError as error:
                raise UserError(f"{name} can't be run: {error}") from None
        answered = (
            AnsweredRow(place, each.prompt, each.references, each.choices, answers)
            for place, each, answers in zip(places, prepared.examples, zip(*found, strict=True), strict=True)
        )
        rows = [row for row in answered if self.only is None or _matches(row, self.only)]
        return Answers(
            task=prepared.task,
            split=prepared.split,
            fitness=prepared.fitness,
            models=tuple(edits),
            examined=len(prepared.examples),
            scores=tuple(score(prepared.metric, [answer.outcome for answer in each]) for each in found),
            rows=tuple(rows if self.rows else rows[: self.limit]),
            scale=scale_of(prepared.metric),
        )

    def _places(self, examples: int) -> Sequence[int]:
        """Return the rows to run, of a split with so many examples."""
        beyond = [row for row in self.rows if row >= examples]
        if beyond:
            raise UserError(
                f"rows: {self.task} ({self.split}) has {examples} rows, counted from 0; {beyond[0]} isn't one"
            )
        if self.rows:
            return sorted(set(self.rows))
        return range(examples if self.only or self.limit is None else min(self.limit, examples))


def _matches(row: AnsweredRow, only: AnswerFilter) -> bool:
    full, *others = row.answers
    return any(
        _SELECTS[only](full.outcome, other.outcome) or (only == "differing" and other.text != full.text)
        for other in others or [full]
    )


@dataclass(frozen=True, slots=True)
class AskedRow:
    """One row of a split as the model reads it, special tokens and truncation included.

    Attributes:
        row: Index in the split, from 0.
        prompt: Text before the answer.
        gold: The right answer as it follows the prompt, whose log-probability is taken; empty without one.
        choices: Every choice as it follows the prompt; empty where answers are open.
    """

    __repr__ = short_repr

    row: int
    prompt: str
    gold: str
    choices: tuple[str, ...]


@record
class PromptsRequest(Request):
    """Show prompts as the model reads them and the answers that are scored, chat template and special tokens included.

    No weights are needed, and nothing is run.

    Raises:
        UserError: the task or split doesn't exist, or the model's config or tokenizer can't be had.
        StoreError: the store or individual doesn't exist.
    """

    individual: IndividualOrFull
    _: KW_ONLY
    task: Task
    split: TaskSplit = "test"
    limit: Annotated[int | None, about("Show at most this many rows.", ge=1)] = 10
    search: SearchOfFull = None
    model: ModelPath = None

    def answer(self, store: StoreReader) -> list[AskedRow]:
        from moevolve.workers.profiling.prompts import PromptMeter

        candidate = find_candidate(store, self.individual, self.search, self.model, weights=False)
        prepared = prepared_split(candidate, self.task, self.split)
        meter = PromptMeter(candidate.config.model, candidate.config.engine)
        texts = meter.texts(prepared if self.limit is None else prepared.head(self.limit))
        return [AskedRow(row, *text) for row, text in enumerate(texts)]
