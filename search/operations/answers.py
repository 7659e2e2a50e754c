"""What individuals and their full model answer to a task's prompts, side by side."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from moevolve.evaluators.errors import CandidateError, UserError
from moevolve.evaluators.fitness.scoring import Answer
from moevolve.evaluators.metrics import score
from moevolve.evaluators.types import PreparedSplit
from moevolve.search.loop.scores import FULL
from moevolve.search.operations.evaluate import prepared_split
from moevolve.search.operations.subject import Subject, find_subject
from moevolve.search.requests import AnswersRequest
from moevolve.store.reader import StoreReader
from moevolve.workers.contract.edits import Edit, IdentityEdit
from moevolve.workers.contract.settings import engine_fingerprint

Only = Literal["differing", "wrong", "lost", "gained"]
"""Rows where an individual's answer differs from the full model's; isn't wholly right; is worth less than the full
model's; is worth more."""


@dataclass(frozen=True, slots=True)
class AnsweredRow:
    """One example of the split.

    Attributes:
        row: its number in the split, from 0.
        prompt: the task's text, without a chat template.
        references: accepted answers, the gold one first.
        choices: the closed set of answers; empty where answers are open.
        answers: one per model.
    """

    row: int
    prompt: str
    references: tuple[str, ...]
    choices: tuple[str, ...]
    answers: tuple[Answer, ...]


@dataclass(frozen=True, slots=True)
class Answers:
    """What models answered.

    Attributes:
        task, split: whose prompts.
        fitness: what reads the answers.
        models: `full`, then the individuals.
        examined: how many rows of the split were run, from the first on.
        scores: of every model on these, in [0, 1].
        rows: those that were asked for.
    """

    task: str
    split: str
    fitness: str
    models: tuple[str, ...]
    examined: int
    scores: tuple[float, ...]
    rows: tuple[AnsweredRow, ...] = field(repr=False)


def answers(store: StoreReader, request: AnswersRequest) -> Answers:
    """See `AnswersRequest`.

    Without `only` no more rows than `limit` are run: batches are others then than those of the whole split, and last
    digits may be.
    """
    from moevolve.workers.checkpoints.loading import placed
    from moevolve.workers.worker import EvaluationWorker

    names = [name for name in dict.fromkeys(request.individuals) if name != FULL]
    subjects = {name: find_subject(store, name, request.search, request.model) for name in names or [FULL]}
    first = _alike(subjects)
    prepared = prepared_split(first, request.task, request.split)
    if prepared.window is not None:
        raise UserError(f"{prepared.task} is running text, which is read in windows: there are no answers to show")
    only = request.only
    if request.limit is not None and only is None:
        prepared = prepared.head(request.limit)
    # One model, on which one edit is made after the other.
    worker = EvaluationWorker(placed(first.config.model, request.device, request.dtype), first.config.engine)
    edits: dict[str, Edit] = {FULL: IdentityEdit()} | {name: subject.edit for name, subject in subjects.items()}
    found = []
    for name, edit in edits.items():
        try:
            found.append(worker.answer(edit, prepared))
        except CandidateError as error:
            raise UserError(f"{name} can't be run: {error}") from None
    rows = [row for row in _rows(prepared, found) if only is None or _is(row, only)]
    scores = [score(prepared.metric, [answer.outcome for answer in each]) for each in found]
    return Answers(
        task=prepared.task,
        split=prepared.split,
        fitness=prepared.fitness,
        models=tuple(edits),
        examined=len(prepared.examples),
        scores=tuple(scores),
        rows=tuple(rows[: request.limit]),
    )


def _alike(subjects: dict[str, Subject]) -> Subject:
    """The first subject, whose model and engine are the others', too."""
    (name, first), *others = subjects.items()
    known = _ran_by(first)
    for other, subject in others:
        if _ran_by(subject) != known:
            raise UserError(f"{name} and {other} are of different models, or their engines' settings differ; ask for "
                            "the answers of one model's individuals at a time")  # fmt: skip
    return first


def _ran_by(subject: Subject) -> tuple[str, str]:
    return subject.facts.fingerprint, engine_fingerprint(subject.config.model, subject.config.engine)


def _rows(split: PreparedSplit, found: Sequence[Sequence[Answer]]) -> Iterator[AnsweredRow]:
    for row, (example, given) in enumerate(zip(split.examples, zip(*found, strict=True), strict=True)):
        yield AnsweredRow(row, example.prompt, example.references, example.choices, given)


def _is(row: AnsweredRow, only: Only) -> bool:
    full, *others = row.answers
    match only:
        case "differing":
            return any((other.text, other.outcome) != (full.text, full.outcome) for other in others)
        case "wrong":
            return any(answer.outcome < 1 for answer in others or [full])
        case "lost":
            return any(other.outcome < full.outcome for other in others)
        case "gained":
            return any(other.outcome > full.outcome for other in others)
