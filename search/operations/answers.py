"""Scores of stored individuals and of full models on any task: prompts, answers, and on which rows they are right."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from moevolve.evaluators.errors import CandidateError, UserError
from moevolve.evaluators.fitness.scoring import Answer
from moevolve.evaluators.metrics import score
from moevolve.evaluators.preparation.registry import load_task
from moevolve.evaluators.types import Example, PreparedSplit, Split
from moevolve.search.config.files import override_lines
from moevolve.search.config.run import TaskSection
from moevolve.search.loop.evaluation_cache import EvaluationCache
from moevolve.search.loop.scores import FULL, outcomes_of, with_outcomes
from moevolve.search.loop.setup import needs_calibration
from moevolve.search.operations.subject import Subject, bound_subject, find_subject
from moevolve.search.requests.answers import AnsweredRow, Answers, AskedRow, Evaluation, Outcomes
from moevolve.search.requests.models import (
    AnswerFilter,
    AnswersRequest,
    EvaluateRequest,
    OutcomesRequest,
    PromptsRequest,
)
from moevolve.store.reader import StoreReader
from moevolve.store.records import FULL_MODEL, EvaluationRecord, IndividualDetail
from moevolve.store.repository import Store
from moevolve.workers.contract.edits import Edit, IdentityEdit
from moevolve.workers.contract.messages import EvaluationRequest
from moevolve.workers.contract.settings import engine_fingerprint


def evaluate(store: Store, request: EvaluateRequest) -> Evaluation:
    """See `EvaluateRequest`."""
    changes = override_lines(request.overrides)
    subject = bound_subject(store, request.individual, request.search, request.model, changes)
    return Evaluation(request.individual, evaluate_subject(store, subject, request.task, request.split))


def evaluate_subject(store: Store, subject: Subject, task: str, split: Split) -> EvaluationRecord:
    """Score a subject on one split of a task in this process; a stored evaluation is reused.

    Raises:
        UserError: there is no such task, or it has no such split.
    """
    from moevolve.search.pools.local import LocalPool
    from moevolve.workers.worker import EvaluationWorker

    prepared = prepared_split(subject, task, split)
    model, engine = subject.config.model, subject.config.engine
    sizes = {}
    if subject.detail is not None:
        names = ("experts", "active", "parameters", "active_parameters")
        sizes = {name: getattr(subject.detail.individual, name) for name in names}
    pool = LocalPool(lambda: EvaluationWorker(model, engine), {prepared.fingerprint: prepared})
    fingerprints = subject.facts.fingerprint, engine_fingerprint(model, engine)
    cache = EvaluationCache(store, pool, None, *fingerprints)
    (settled,) = cache.settle([EvaluationRequest(subject.edit, (prepared.ref,), **sizes)])
    return with_outcomes(store, settled.evaluations[0])


def prepared_split(subject: Subject, name: str, split: Split) -> PreparedSplit:
    """Prepare a split as the subject's search does, or by the task file for a task that the search doesn't have."""
    section = next((item for item in subject.config.tasks if name in (item.name, load_task(item.name).name)), None)
    if section is None:
        return TaskSection(name=name).prepared(split)
    return section.prepared(split, calibrating=needs_calibration(subject.space))


def answers(store: StoreReader, request: AnswersRequest) -> Answers:
    """See `AnswersRequest`.

    Without `only`, no more rows than `limit` are run. Batches then differ from those of the whole split, and so may the
    last digits of log-probabilities.

    Raises:
        UserError: as there; or `rows` names one that the split doesn't have.
    """
    from moevolve.workers.checkpoints.loading import placed
    from moevolve.workers.worker import EvaluationWorker

    names = [name for name in dict.fromkeys(request.individuals) if name != FULL] or [FULL]
    subjects = {name: find_subject(store, name, request.search, request.model) for name in names}
    first = subjects[names[0]]
    for name, subject in subjects.items():
        if _model_and_engine(subject) != _model_and_engine(first):
            raise UserError(
                f"{names[0]} and {name} are of different models, or their engines' settings differ; ask for the "
                "answers of one model's individuals at a time"
            )
    prepared = prepared_split(first, request.task, request.split)
    if prepared.window is not None:
        raise UserError(f"{prepared.task} is running text, which is read in windows: there are no answers to show")
    only = request.only
    places = _places(request, len(prepared.examples))
    prepared = prepared.only(places)
    # One resident model, to which the edits are applied one after the other.
    worker = EvaluationWorker(placed(first.config.model, request.device, request.dtype), first.config.engine)
    edits: dict[str, Edit] = {FULL: IdentityEdit()} | {name: subject.edit for name, subject in subjects.items()}
    found: list[tuple[Answer, ...]] = []
    for name, edit in edits.items():
        try:
            found += worker.answer(edit, prepared)
        except CandidateError as error:
            raise UserError(f"{name} can't be run: {error}") from None
    answered = map(_row, places, prepared.examples, zip(*found, strict=True))
    rows = [row for row in answered if only is None or _matches(row, only)]
    return Answers(
        task=prepared.task,
        split=prepared.split,
        fitness=prepared.fitness,
        models=tuple(edits),
        examined=len(prepared.examples),
        scores=tuple(score(prepared.metric, [answer.outcome for answer in each]) for each in found),
        rows=tuple(rows if request.rows else rows[: request.limit]),
    )


def outcomes(store: StoreReader, request: OutcomesRequest) -> Outcomes:
    """See `OutcomesRequest`."""
    detail = store.individual(request.individual)
    mine, theirs = _stored_pair(store, detail, request)
    pair = np.stack([outcomes_of(theirs), outcomes_of(mine)])
    chosen = {name: np.flatnonzero(selects(*pair)) for name, selects in _SELECTS.items()}
    places = np.arange(pair.shape[1]) if request.only is None else chosen[request.only]
    shown = places[request.offset : request.offset + request.limit].tolist()
    examples, note = _examples(store, detail.ref, mine)
    answered = [tuple(Answer(None, (), outcome) for outcome in pair[:, row].tolist()) for row in shown]
    asked = [Example("", ()) if examples is None else examples[row] for row in shown]
    return Outcomes(
        task=mine.task,
        split=request.split,
        models=(request.against, detail.ref),
        examples=pair.shape[1],
        counts={name: len(rows) for name, rows in chosen.items()},
        found=len(places),
        rows=tuple(map(_row, shown, asked, answered)),
        note=note,
    )


def prompts(store: StoreReader, request: PromptsRequest) -> list[AskedRow]:
    """See `PromptsRequest`."""
    from moevolve.workers.profiling.passes import PromptMeter

    subject = find_subject(store, request.individual, request.search, request.model, weights=False)
    prepared = prepared_split(subject, request.task, request.split)
    meter = PromptMeter(subject.config.model, subject.config.engine)
    texts = meter.texts(prepared if request.limit is None else prepared.head(request.limit))
    return [AskedRow(row, *text) for row, text in enumerate(texts)]


def _model_and_engine(subject: Subject) -> tuple[str, str]:
    return subject.facts.fingerprint, engine_fingerprint(subject.config.model, subject.config.engine)


def _places(request: AnswersRequest, examples: int) -> Sequence[int]:
    """The rows to run, of a split with so many examples."""
    beyond = [row for row in request.rows if row >= examples]
    if beyond:
        raise UserError(
            f"rows: {request.task} ({request.split}) has {examples} rows, counted from 0; {beyond[0]} isn't one"
        )
    if request.rows:
        return sorted(set(request.rows))
    return range(examples if request.only or request.limit is None else min(request.limit, examples))


_SELECTS: Mapping[AnswerFilter, Callable[[Any, Any], Any]] = {
    "differing": lambda full, other: other != full,
    "lost": lambda full, other: other < full,
    "gained": lambda full, other: other > full,
    "wrong": lambda full, other: other < 1,
    "both_wrong": lambda full, other: (full < 1) & (other < 1),
}
"""Which pairs of outcomes a filter selects, given as numbers or as arrays."""


def _matches(row: AnsweredRow, only: AnswerFilter) -> bool:
    full, *others = row.answers
    return any(
        _SELECTS[only](full.outcome, other.outcome) or (only == "differing" and other.text != full.text)
        for other in others or [full]
    )


def _row(row: int, example: Example, answers: tuple[Answer, ...]) -> AnsweredRow:
    return AnsweredRow(row, example.prompt, example.references, example.choices, answers)


def _stored_pair(
    store: StoreReader, detail: IndividualDetail, request: OutcomesRequest
) -> tuple[EvaluationRecord, EvaluationRecord]:
    """The evaluations of an individual and of the model that it is compared with, on the same rows."""
    wanted = [one for one in detail.evaluations if (one.task, one.split) == (request.task, request.split)]
    mine = _with_outcomes(wanted, detail.ref, request)
    if request.against == FULL:
        search, phenotype = detail.search, FULL_MODEL
    else:
        other = store.individual(request.against)
        search, phenotype = other.search, other.individual.phenotype_hash
    found = store.evaluations(phenotype, search.model_fingerprint, search.engine_fingerprint, [mine.task_fingerprint])
    return mine, _with_outcomes(found, request.against, request)


def _with_outcomes(found: Sequence[EvaluationRecord], name: str, request: OutcomesRequest) -> EvaluationRecord:
    """The last evaluation that has outcomes.

    Raises:
        UserError: there is none.
    """
    kept = [one for one in found if one.outcomes]
    if not kept:
        command = f"moevolve evaluate {name} --task {request.task} --split {request.split}"
        raise UserError(f"{name} has no stored outcomes on {request.task} ({request.split}): `{command}` stores them")
    return kept[-1]


def _examples(store: StoreReader, ref: str, evaluation: EvaluationRecord) -> tuple[Sequence[Example] | None, str]:
    """The examples that an evaluation was about; or None, and why they can't be had."""
    try:
        prepared = prepared_split(find_subject(store, ref, weights=False), evaluation.task, evaluation.split)
    except UserError as error:
        return None, f"The prompts can't be read: {error}"
    if prepared.window is not None:
        return None, "Outcomes are of windows of running text, which have no prompts."
    if prepared.fingerprint != evaluation.task_fingerprint:
        return None, "The task's data is another one now than that which was scored."
    return prepared.examples, ""
