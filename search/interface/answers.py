"""Answers of stored individuals and of full models to any task's prompts, and the prompts as the model reads them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Annotated, Any, Literal, Self

import numpy as np
from pydantic import Field

from moevolve.evaluators.errors import CandidateError, UserError
from moevolve.evaluators.fitness.scoring import Answer
from moevolve.evaluators.metrics import scale_of, score
from moevolve.evaluators.records import short_repr
from moevolve.evaluators.scales import ScaleName
from moevolve.evaluators.types import Example, Split
from moevolve.search.config.run import LONGEST_NAME
from moevolve.search.interface.parameters import (
    IndividualOrFull,
    IndividualRef,
    ModelDevice,
    ModelDtype,
    ModelPath,
    SearchOfFull,
    Task,
    TaskSplit,
    Threads,
)
from moevolve.search.interface.request import Flag, Request, about, record
from moevolve.search.loop.scores import FULL, outcomes_of
from moevolve.search.running.candidates import find_candidate, prepared_split
from moevolve.search.running.observer import SILENT, Observer
from moevolve.store.reader import StoreReader
from moevolve.store.records import FULL_MODEL, EvaluationRecord, IndividualDetail
from moevolve.workers.contract.edits import Edit, IdentityEdit
from moevolve.workers.contract.settings import engine_fingerprint

AnswerFilter = Literal["differing", "lost", "gained", "wrong", "both_wrong"]
Only = Annotated[
    AnswerFilter | None,
    about(
        "Only rows where an individual answers otherwise than the model it is compared with "
        "(`differing`), scores below (`lost`) or above it (`gained`), isn't fully right (`wrong`), or neither is "
        "(`both_wrong`). The whole split is run then, unless rows are named."
    ),
]


SELECTS: Mapping[AnswerFilter, Callable[[Any, Any], Any]] = {
    "differing": lambda full, other: other != full,
    "lost": lambda full, other: other < full,
    "gained": lambda full, other: other > full,
    "wrong": lambda full, other: other < 1,
    "both_wrong": lambda full, other: (full < 1) & (other < 1),
}
"""Which pairs of outcomes a filter selects, given as numbers or as arrays."""


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

    @classmethod
    def of(cls, row: int, example: Example, answers: tuple[Answer, ...]) -> Self:
        """Make a row of an example and its answers."""
        return cls(row, example.prompt, example.references, example.choices, answers)


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
        UserError: there is no such task or split, individuals are of different models, or one can't be run.
        StoreError: there is no such store or individual.
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
        candidates = {name: find_candidate(store, name, self.search, self.model, task=self.task) for name in names}
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
        answered = map(AnsweredRow.of, places, prepared.examples, zip(*found, strict=True))
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
        """The rows to run, of a split with so many examples."""
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
        SELECTS[only](full.outcome, other.outcome) or (only == "differing" and other.text != full.text)
        for other in others or [full]
    )


@dataclass(frozen=True, slots=True)
class StoredAnswers:
    """On which rows of a split two models are right.

    Attributes:
        models: The model that the individual is compared with, and the individual.
        examples: Number of rows of the split.
        counts: Number of rows by what `only` may be.
        found: Number of rows that the request selects, of which `rows` are shown.
        rows: Rows with outcomes and without answers' texts.
        note: Why there are no prompts; empty if there are.
        scale: Scale that outcomes are shown on.
    """

    __repr__ = short_repr

    task: str
    split: Split
    models: tuple[str, str]
    examples: int
    counts: dict[str, int]
    found: int
    rows: tuple[AnsweredRow, ...] = field(repr=False)
    note: str = ""
    scale: ScaleName = "percent"


@record
class StoredAnswersRequest(Request):
    """Show on which rows an individual and another model are right, from stored evaluations. Nothing is run.

    Prompts and right answers are read from the task's data; where those can't be had, only the outcomes are shown.

    Raises:
        UserError: one of the two wasn't scored on the split, or its outcomes weren't kept.
        StoreError: there is no such store or individual.
    """

    route = "/individuals/{individual}/answers"
    individual: IndividualRef
    _: KW_ONLY
    task: Task
    split: TaskSplit = "test"
    against: Annotated[
        str,
        about(
            "The model to compare with: `full`, or another individual as SEARCH:INDEX.", max_length=LONGEST_NAME + 20
        ),
    ] = "full"
    only: Only = None
    limit: Annotated[int, about("Show at most this many rows, those first where the models differ.", ge=1, le=1000)] = (
        25
    )
    offset: Annotated[int, about("Leave this many of the rows out that would come first.", ge=0)] = 0

    def answer(self, store: StoreReader) -> StoredAnswers:
        detail = store.individual(self.individual)
        mine, theirs = self._stored_pair(store, detail)
        pair = np.stack([outcomes_of(theirs), outcomes_of(mine)])
        chosen = {name: np.flatnonzero(selects(*pair)) for name, selects in SELECTS.items()}
        differing = chosen["differing"]
        same = np.setdiff1d(np.arange(pair.shape[1]), differing)
        places = np.concatenate([differing, same]) if self.only is None else chosen[self.only]
        shown = places[self.offset : self.offset + self.limit].tolist()
        examples, note = _examples(store, detail.ref, mine)
        answered = [tuple(Answer(None, (), outcome) for outcome in pair[:, row].tolist()) for row in shown]
        asked = [Example("", ()) if examples is None else examples[row] for row in shown]
        return StoredAnswers(
            task=mine.task,
            split=self.split,
            models=(self.against, detail.ref),
            examples=pair.shape[1],
            counts={name: len(rows) for name, rows in chosen.items()},
            found=len(places),
            rows=tuple(map(AnsweredRow.of, shown, asked, answered)),
            note=note,
            scale=mine.scale,
        )

    def _stored_pair(self, store: StoreReader, detail: IndividualDetail) -> tuple[EvaluationRecord, EvaluationRecord]:
        """The evaluations of an individual and of the model that it is compared with, on the same rows."""
        wanted = [one for one in detail.evaluations if (one.task, one.split) == (self.task, self.split)]
        mine = self._with_outcomes(wanted, detail.ref)
        if self.against == FULL:
            search, phenotype = detail.search, FULL_MODEL
        else:
            other = store.individual(self.against)
            search, phenotype = other.search, other.individual.phenotype_hash
        prints = search.model_fingerprint, search.engine_fingerprint
        found = store.evaluations(phenotype, *prints, [mine.task_fingerprint])
        return mine, self._with_outcomes(found, self.against)

    def _with_outcomes(self, found: Sequence[EvaluationRecord], name: str) -> EvaluationRecord:
        """The last evaluation that has outcomes."""
        kept = [one for one in found if one.outcomes]
        if not kept:
            command = f"moevolve evaluate {name} --task {self.task} --split {self.split}"
            raise UserError(f"{name} has no stored outcomes on {self.task} ({self.split}): `{command}` stores them")
        return kept[-1]


def _examples(store: StoreReader, ref: str, evaluation: EvaluationRecord) -> tuple[Sequence[Example] | None, str]:
    """The examples that an evaluation was about; or None, and why they can't be had."""
    try:
        prepared = prepared_split(find_candidate(store, ref, weights=False), evaluation.task, evaluation.split)
    except UserError as error:
        return None, f"The prompts can't be read: {error}"
    if prepared.window is not None:
        return None, "Outcomes are of windows of running text, which have no prompts."
    if prepared.fingerprint != evaluation.task_fingerprint:
        return None, "The task's data is another one now than that which was scored."
    return prepared.examples, ""


@dataclass(frozen=True, slots=True)
class AskedRow:
    """One row of a split as the model reads it, special tokens and truncation included.

    Attributes:
        row: Index in the split, from 0.
        prompt: Text before the answer.
        gold: The right answer as it follows the prompt, whose log-probability is taken; empty where there is none.
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
        UserError: there is no such task or split, or the model's config or tokenizer can't be had.
        StoreError: there is no such store or individual.
    """

    individual: IndividualOrFull
    _: KW_ONLY
    task: Task
    split: TaskSplit = "test"
    limit: Annotated[int | None, about("Show at most this many rows.", ge=1)] = 10
    search: SearchOfFull = None
    model: ModelPath = None

    def answer(self, store: StoreReader) -> list[AskedRow]:
        from moevolve.workers.profiling.passes import PromptMeter

        candidate = find_candidate(store, self.individual, self.search, self.model, weights=False)
        prepared = prepared_split(candidate, self.task, self.split)
        meter = PromptMeter(candidate.config.model, candidate.config.engine)
        texts = meter.texts(prepared if self.limit is None else prepared.head(self.limit))
        return [AskedRow(row, *text) for row, text in enumerate(texts)]
