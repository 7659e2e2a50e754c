"""A task's prompts as a model reads them, and what individuals and their full model answer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from moevolve.evaluators.errors import CandidateError, UserError
from moevolve.evaluators.fitness.scoring import Answer
from moevolve.evaluators.metrics import score
from moevolve.evaluators.types import PreparedSplit
from moevolve.search.loop.scores import FULL
from moevolve.search.operations.evaluate import prepared_split
from moevolve.search.operations.subject import Subject, find_subject
from moevolve.search.requests.answers import AnsweredRow, Answers, AskedRow
from moevolve.search.requests.models import AnswerFilter, AnswersRequest, PromptsRequest
from moevolve.store.reader import StoreReader
from moevolve.workers.contract.edits import Edit, IdentityEdit
from moevolve.workers.contract.settings import engine_fingerprint


def answers(store: StoreReader, request: AnswersRequest) -> Answers:
    """See `AnswersRequest`.

    Without `only`, no more rows than `limit` are run. Batches then differ from those of the whole split, and so may the
    last digits of log-probabilities.
    """
    from moevolve.workers.checkpoints.loading import placed
    from moevolve.workers.worker import EvaluationWorker

    names = [name for name in dict.fromkeys(request.individuals) if name != FULL]
    subjects = {name: find_subject(store, name, request.search, request.model) for name in names or [FULL]}
    first = _first_of_one_model(subjects)
    prepared = prepared_split(first, request.task, request.split)
    if prepared.window is not None:
        raise UserError(f"{prepared.task} is running text, which is read in windows: there are no answers to show")
    only = request.only
    if request.limit is not None and only is None:
        prepared = prepared.head(request.limit)
    # One resident model, to which the edits are applied one after the other.
    worker = EvaluationWorker(placed(first.config.model, request.device, request.dtype), first.config.engine)
    edits: dict[str, Edit] = {FULL: IdentityEdit()} | {name: subject.edit for name, subject in subjects.items()}
    found: list[tuple[Answer, ...]] = []
    for name, edit in edits.items():
        try:
            found += worker.answer(edit, prepared)
        except CandidateError as error:
            raise UserError(f"{name} can't be run: {error}") from None
    rows = [row for row in _rows(prepared, found) if only is None or _matches(row, only)]
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


def prompts(store: StoreReader, request: PromptsRequest) -> list[AskedRow]:
    """See `PromptsRequest`."""
    from moevolve.workers.profiling.passes import PromptMeter

    subject = find_subject(store, request.individual, request.search, request.model, weights=False)
    prepared = prepared_split(subject, request.task, request.split)
    meter = PromptMeter(subject.config.model, subject.config.engine)
    texts = meter.texts(prepared if request.limit is None else prepared.head(request.limit))
    return [AskedRow(row, *text) for row, text in enumerate(texts)]


def _first_of_one_model(subjects: dict[str, Subject]) -> Subject:
    """Return the first subject, after checking that all have the same model and engine settings."""
    (name, first), *others = subjects.items()
    known = _model_and_engine(first)
    for other, subject in others:
        if _model_and_engine(subject) != known:
            raise UserError(f"{name} and {other} are of different models, or their engines' settings differ; ask for "
                            "the answers of one model's individuals at a time")  # fmt: skip
    return first


def _model_and_engine(subject: Subject) -> tuple[str, str]:
    return subject.facts.fingerprint, engine_fingerprint(subject.config.model, subject.config.engine)


def _rows(split: PreparedSplit, found: Sequence[Sequence[Answer]]) -> Iterator[AnsweredRow]:
    for row, (example, given) in enumerate(zip(split.examples, zip(*found, strict=True), strict=True)):
        yield AnsweredRow(row, example.prompt, example.references, example.choices, given)


def _matches(row: AnsweredRow, only: AnswerFilter) -> bool:
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
