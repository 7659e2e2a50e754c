"""Scoring a stored individual, or the full model of a search, on any task."""

from __future__ import annotations

from moevolve.evaluators.preparation.registry import load_task
from moevolve.evaluators.types import PreparedSplit, Split
from moevolve.search.config.files import override_lines
from moevolve.search.config.run import TaskSection
from moevolve.search.loop.evaluation_cache import EvaluationCache
from moevolve.search.loop.scores import with_outcomes
from moevolve.search.loop.setup import needs_calibration
from moevolve.search.operations.subject import Subject, bound_subject
from moevolve.search.requests.answers import Evaluation
from moevolve.search.requests.models import EvaluateRequest
from moevolve.store.records import EvaluationRecord
from moevolve.store.repository import Store
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
