"""The score of a stored individual, or of a full model, on any task."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, field

from pydantic import computed_field

from moevolve.evaluators.errors import UserError
from moevolve.evaluators.records import short_repr
from moevolve.search.config.files import override_lines
from moevolve.search.interface.parameters import (
    IndividualOrFull,
    ModelPath,
    ModelSettings,
    SearchOfFull,
    Task,
    TaskSplit,
    Threads,
)
from moevolve.search.interface.request import Request, record
from moevolve.search.loop.evaluation_cache import EvaluationCache
from moevolve.search.loop.scores import interval, with_outcomes
from moevolve.search.running.candidates import bound_candidate, prepared_split
from moevolve.search.running.observer import SILENT, Observer
from moevolve.store.records import EvaluationRecord
from moevolve.store.repository import Store
from moevolve.workers.contract.messages import EvaluationRequest
from moevolve.workers.contract.settings import engine_fingerprint


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The score of an individual or of the full model on one split of a task.

    Attributes:
        ref: `SEARCH:INDEX`, or `full`.
        record: What is stored, with per-example outcomes.
    """

    __repr__ = short_repr

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


@record
class EvaluateRequest(Request):
    """Score an individual, or the full model, on one split of a task, in this process. The result is stored.

    Under other settings it is another evaluation, stored beside the first.

    Raises:
        UserError: the task or split doesn't exist, a setting can't be changed like that, the model can't be loaded, or
            a row can't be read.
        StoreError: the store, search or individual doesn't exist.
    """

    writes = True
    individual: IndividualOrFull
    _: KW_ONLY
    task: Task
    split: TaskSplit = "test"
    search: SearchOfFull = None
    model: ModelPath = None
    threads: Threads = None
    overrides: ModelSettings = ()

    def answer(self, store: Store, *, observer: Observer = SILENT) -> Evaluation:
        observer.on_stage("reading the search and the task")
        changes = list(override_lines(self.overrides))
        changes += [] if self.threads is None else [f"engine.threads={self.threads}"]
        candidate = bound_candidate(store, self.individual, self.search, self.model, changes, self.task)
        prepared = prepared_split(candidate, self.task, self.split)
        from moevolve.search.pools.local import LocalPool
        from moevolve.workers.worker import EvaluationWorker

        model, engine = candidate.config.model, candidate.config.engine
        sizes = {}
        if candidate.detail is not None:
            names = ("experts", "active", "parameters", "active_parameters")
            sizes = {name: getattr(candidate.detail.individual, name) for name in names}

        def load() -> EvaluationWorker:
            observer.on_stage("loading the model")
            worker = EvaluationWorker(model, engine)
            observer.on_stage(f"scoring {len(prepared.examples):,} rows of {prepared.task} ({prepared.split})")
            return worker

        pool = LocalPool(load, {prepared.fingerprint: prepared})
        fingerprints = candidate.facts.fingerprint, engine_fingerprint(model, engine)
        cache = EvaluationCache(store, pool, None, *fingerprints)
        (settled,) = cache.settle([EvaluationRequest(candidate.edit, (prepared.ref,), **sizes)])
        if not settled.evaluations:
            raise UserError(f"{self.individual} can't be scored on {prepared.task} ({self.split}): {settled.failure}")
        (found,) = settled.evaluations
        return Evaluation(self.individual, found if found.failure is not None else with_outcomes(store, found))
