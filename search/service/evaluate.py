"""Scoring a stored individual, or a search's full model, on any task."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from moevolve.evaluators.metrics import confidence_interval
from moevolve.evaluators.tasks.registry import load_task
from moevolve.evaluators.types import PreparedSplit, Split
from moevolve.search.config.run import RunConfig, StoredConfig, TaskSection
from moevolve.search.loop.evaluation_cache import EvaluationCache, Job, SplitRef
from moevolve.search.loop.scores import weighted_means
from moevolve.search.service.data import as_data
from moevolve.search.service.subject import FULL as FULL
from moevolve.search.service.subject import Subject, find_subject
from moevolve.store.records import EvaluationRecord, SearchRecord
from moevolve.store.repository import Store
from moevolve.workers.config import engine_fingerprint
from moevolve.workers.methods.base import IdentityEdit


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
    store: Store, reference: str, task: str, split: Split, search: str | None = None, model: str | None = None
) -> Evaluation:
    """Score an individual, or the full model, on one split of a task in this process; the result is stored.

    `reference`, `search` and `model` are as `find_subject` has them.

    Raises:
        StoreError: no such individual or search.
        UserError: unknown task, or it has no such split; as `find_subject`.
    """
    subject = find_subject(store, reference, search, model)
    return Evaluation(reference, evaluate_subject(store, subject, task, split))


def evaluate_subject(store: Store, subject: Subject, task: str, split: Split) -> EvaluationRecord:
    """Score a subject on one split of a task in this process; a stored evaluation is reused.

    Raises:
        UserError: unknown task, or it has no such split.
    """
    from moevolve.search.pools.local import LocalPool
    from moevolve.workers.worker import EvaluationWorker

    prepared = prepared_split(subject.config, task, split)
    model, engine = subject.config.model.to_worker(), subject.config.engine.to_worker()
    reference = SplitRef.of(prepared)
    individual = None if subject.detail is None else subject.detail.individual
    job = Job(
        subject.edit,
        (reference,),
        None if individual is None else individual.experts,
        None if individual is None else individual.active,
        None if individual is None else individual.parameters,
    )
    pool = LocalPool(lambda: EvaluationWorker(model, engine), {prepared.fingerprint: prepared})
    cache = EvaluationCache(store, pool, subject.facts.fingerprint, engine_fingerprint(model, engine))
    (settled,) = cache.run([job])
    store.record(subject.search.id, evaluations=cache.unsaved)
    return with_outcomes(store, settled.evaluations[0])


def interval(record: EvaluationRecord) -> tuple[float, float]:
    """95 % confidence interval of a stored evaluation's score, from its per-example outcomes."""
    outcomes = np.frombuffer(record.outcomes or b"", dtype="<f4")
    return confidence_interval(outcomes, metric=record.metric)


def prepared_split(config: StoredConfig, name: str, split: Split) -> PreparedSplit:
    """The split as the search's configuration has it, or as the task file says for another task."""
    sections = config.tasks if isinstance(config, RunConfig) else ()
    section = next((item for item in sections if name in (item.name, load_task(item.name).name)), None)
    return (TaskSection(name=name) if section is None else section).prepared(split)


def with_outcomes(store: Store, record: EvaluationRecord) -> EvaluationRecord:
    """The same evaluation with its per-example outcomes."""
    return store.evaluations(
        record.phenotype_hash, record.model_fingerprint, record.engine_fingerprint, [record.task_fingerprint]
    )[0]


def full_fitness(store: Store, search: SearchRecord) -> float | None:
    """Fitness of a search's unedited model, None if it isn't evaluated yet."""
    tasks = [task for task in store.search_tasks(search.id) if task.split == "search"]
    found = {
        record.task_fingerprint: record
        for record in store.evaluations(
            IdentityEdit().phenotype_hash,
            search.model_fingerprint,
            search.engine_fingerprint,
            [task.task_fingerprint for task in tasks],
        )
    }
    if not tasks or any(task.task_fingerprint not in found for task in tasks):
        return None
    records = tuple(found[task.task_fingerprint] for task in tasks)
    return weighted_means(records, tuple(task.weight for task in tasks))[0]
