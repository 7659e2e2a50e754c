"""Scoring a stored individual, or a search's full model, on any task."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from moevolve.evaluators.tasks.registry import load_task
from moevolve.evaluators.types import PreparedSplit, Split
from moevolve.search.config.run import RunConfig, TaskSection
from moevolve.search.loop.evaluation_cache import EvaluationCache
from moevolve.search.loop.scores import interval, with_outcomes
from moevolve.search.loop.setup import needs_calibration
from moevolve.search.service.data import as_data
from moevolve.search.service.subject import Subject, bound_subject
from moevolve.store.records import EvaluationRecord
from moevolve.store.repository import Store
from moevolve.workers.config import engine_fingerprint
from moevolve.workers.messages import EvaluationRequest


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What a subject scored on one split of a task.

    Attributes:
        ref: the subject: `SEARCH:INDEX`, or `full`.
        record: as the store has it, with its per-example outcomes.
    """

    ref: str
    record: EvaluationRecord = field(repr=False)

    @property
    def score(self) -> float | None:
        """In [0, 1]; None for a candidate that failed."""
        return self.record.score

    @property
    def interval(self) -> tuple[float, float] | None:
        """95 % confidence interval of the score; None for a candidate that failed."""
        return None if self.record.score is None else interval(self.record)


@as_data.register
def _(found: Evaluation) -> dict[str, Any]:
    record = found.record
    return {
        "id": found.ref,
        "task": record.task,
        "split": record.split,
        "score": record.score,
        "interval": as_data(found.interval),
        "gold_logprob": record.gold_logprob,
        "examples": record.examples_seen,
        "failure": record.failure,
        "seconds": record.seconds,
    }


def evaluate(
    store: Store,
    reference: str,
    task: str,
    split: Split,
    search: str | None = None,
    model: str | None = None,
    overrides: Sequence[str] = (),
) -> Evaluation:
    """Score an individual, or the full model, on one split of a task in this process; the result is stored.

    `reference`, `search`, `model` and `overrides` are as `bound_subject` has them.

    Raises:
        StoreError: no such individual or search.
        UserError: unknown task, or it has no such split; as `bound_subject`.
    """
    subject = bound_subject(store, reference, search, model, overrides)
    return Evaluation(reference, evaluate_subject(store, subject, task, split))


def evaluate_subject(store: Store, subject: Subject, task: str, split: Split) -> EvaluationRecord:
    """Score a subject on one split of a task in this process; a stored evaluation is reused.

    Raises:
        UserError: unknown task, or it has no such split.
    """
    from moevolve.search.pools.local import LocalPool
    from moevolve.workers.worker import EvaluationWorker

    prepared = prepared_split(subject, task, split)
    model, engine = subject.config.model, subject.config.engine
    individual = None if subject.detail is None else subject.detail.individual
    sizes = () if individual is None else (individual.experts, individual.active, individual.parameters)
    pool = LocalPool(lambda: EvaluationWorker(model, engine), {prepared.fingerprint: prepared})
    fingerprints = subject.facts.fingerprint, engine_fingerprint(model, engine)
    cache = EvaluationCache(store, pool, None, *fingerprints)
    (settled,) = cache.settle([EvaluationRequest(subject.edit, (prepared.ref,), *sizes)])
    return with_outcomes(store, settled.evaluations[0])


def prepared_split(subject: Subject, name: str, split: Split) -> PreparedSplit:
    """The split as the subject's search has it, or as the task file says for another task."""
    sections = subject.config.tasks if isinstance(subject.config, RunConfig) else ()
    section = next((item for item in sections if name in (item.name, load_task(item.name).name)), None)
    if section is None:
        return TaskSection(name=name).prepared(split)
    return section.prepared(split, calibrating=needs_calibration(subject.space))
