"""Evaluations on demand: known ones from the store, the others from the pool, no phenotype ever twice at once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Self

from moevolve.evaluators.types import PreparedSplit, Split
from moevolve.search.pools.base import Completion, Pool
from moevolve.store.records import EvaluationRecord, FailureKind
from moevolve.store.repository import Store
from moevolve.workers.messages import EvaluationRequest, TaskResult
from moevolve.workers.methods.base import Edit, IdentityEdit


@dataclass(frozen=True, slots=True)
class SplitRef:
    """One prepared split by name, fingerprint and the metric it is scored by."""

    task: str
    split: Split
    fingerprint: str
    metric: str

    @classmethod
    def of(cls, prepared: PreparedSplit) -> Self:
        return cls(prepared.task, prepared.split, prepared.fingerprint, prepared.metric)


@dataclass(frozen=True, slots=True)
class Job:
    """A phenotype to be scored on some splits.

    Attributes:
        edit: what to apply.
        splits: where to score it.
        experts, active, parameters: for the record; None for the full model.
        penalty: what the search takes off its score.
    """

    edit: Edit
    splits: tuple[SplitRef, ...]
    experts: int | None = None
    active: int | None = None
    parameters: int | None = None
    penalty: float = 0.0

    @property
    def key(self) -> tuple[str, tuple[str, ...]]:
        return self.edit.phenotype_hash, tuple(split.fingerprint for split in self.splits)


@dataclass(frozen=True, slots=True)
class Settled:
    """How a job ended.

    Attributes:
        evaluations: in the order of its splits; where it failed, those that there are.
        reused: whether all that settles it was known already.
        failure: why it failed, None if it didn't.
        failure_kind: whose fault that is.
    """

    job: Job
    evaluations: tuple[EvaluationRecord, ...] = field(repr=False)
    reused: bool
    failure: str | None = None
    failure_kind: FailureKind | None = None


class EvaluationCache:
    """Takes jobs, gives back settled ones.

    An evaluation is a function of phenotype, split and settings: a candidate that fails on one split keeps what it
    scored on others, and is not tried on those that come after. A failure that isn't the candidate's own (its workers
    died, time ran out) settles the job, but is no evaluation: who asks again has it tried again.

    Args:
        store: where evaluations are looked up; the caller writes new ones (`unsaved`).
        pool: who evaluates.
        model_fingerprint: identity of the checkpoint.
        engine_fingerprint: identity of the engine's settings.
    """

    def __init__(self, store: Store, pool: Pool, model_fingerprint: str, engine_fingerprint: str) -> None:
        self._store = store
        self._pool = pool
        self._model = model_fingerprint
        self._engine = engine_fingerprint
        self._known: dict[tuple[str, str], EvaluationRecord] = {}
        self._in_flight: dict[str, Job] = {}
        self._open_keys: set[tuple[str, tuple[str, ...]]] = set()
        self._unsaved: list[EvaluationRecord] = []
        self._tickets = 0

    @property
    def in_flight(self) -> int:
        return len(self._in_flight)

    def request(self, jobs: Sequence[Job]) -> list[Settled]:
        """Submit jobs; those whose outcome is known come back at once.

        A job that is in flight already is not submitted again: it settles once, so callers wait by `Job.key`.
        """
        self._look_up(jobs)
        settled = []
        for job in jobs:
            missing = tuple(split.fingerprint for split in job.splits if self._find(job, split) is None)
            if not missing or self._known_failure(job) is not None:
                settled.append(self._settle(job, reused=True))
            elif job.key not in self._open_keys:
                self._open_keys.add(job.key)
                self._tickets += 1
                ticket = f"{job.edit.phenotype_hash[:12]}-{self._tickets}"
                self._in_flight[ticket] = job
                self._pool.submit(EvaluationRequest(ticket, job.edit, missing))
        return settled

    def poll(self, timeout: float) -> list[Settled]:
        """Wait up to `timeout` seconds for the pool and return what settled."""
        return [item for completion in self._pool.poll(timeout) for item in self._complete(completion)]

    def run(self, jobs: Sequence[Job], timeout: float = 1.0) -> Iterable[Settled]:
        """Settle all `jobs`, yielding each as it does."""
        missing = {job.key: job for job in jobs}
        arrived = self.request(jobs)
        while True:
            for item in arrived:
                if missing.pop(item.job.key, None) is not None:
                    yield item
            if not missing:
                return
            arrived = self.poll(timeout)

    @property
    def unsaved(self) -> list[EvaluationRecord]:
        """New evaluations that the caller has yet to record."""
        return list(self._unsaved)

    def saved(self, count: int) -> None:
        """The first `count` unsaved evaluations are recorded."""
        del self._unsaved[:count]

    def _look_up(self, jobs: Sequence[Job]) -> None:
        unknown = {job.edit.phenotype_hash for job in jobs if any(self._find(job, s) is None for s in job.splits)}
        if not unknown:
            return
        fingerprints = sorted({split.fingerprint for job in jobs for split in job.splits})
        for record in self._store.evaluations(sorted(unknown), self._model, self._engine, fingerprints):
            self._remember(record)

    def _find(self, job: Job, split: SplitRef) -> EvaluationRecord | None:
        return self._known.get((job.edit.phenotype_hash, split.fingerprint))

    def _known_failure(self, job: Job) -> str | None:
        """Why the candidate failed by its own fault, if it did on any of the job's splits."""
        records = (self._find(job, split) for split in job.splits)
        return next((one.failure for one in records if one is not None and one.failure is not None), None)

    def _remember(self, record: EvaluationRecord) -> None:
        # Outcomes stay in the store: a long search would fill the driver's memory with them.
        self._known[record.phenotype_hash, record.task_fingerprint] = replace(record, outcomes=None)

    def _settle(self, job: Job, *, reused: bool) -> Settled:
        found = (self._find(job, split) for split in job.splits)
        records = tuple(record for record in found if record is not None)
        failure = self._known_failure(job)
        return Settled(job, records, reused, failure, None if failure is None else "candidate")

    def _complete(self, completion: Completion) -> list[Settled]:
        reply = completion.reply
        job = self._in_flight.pop(reply.ticket, None)
        if job is None:
            return []
        self._open_keys.discard(job.key)
        results = {result.task_fingerprint: result for result in reply.results}
        for split in job.splits:
            result = results.get(split.fingerprint)
            failed = reply.kind == "candidate" and split.fingerprint in reply.failed_on
            if self._find(job, split) is None and (result is not None or failed):
                self._take(self._record(job, split, completion, result))
        settled = self._settle(job, reused=False)
        if settled.failure is None and len(settled.evaluations) < len(job.splits):
            settled = replace(settled, failure=reply.failure or "no result was returned", failure_kind=reply.kind)
        return [settled]

    def _take(self, record: EvaluationRecord) -> None:
        self._remember(record)
        # The unedited model's failure blames no candidate: it isn't stored, so that a resume tries again.
        if record.failure is None or record.phenotype_hash != IdentityEdit().phenotype_hash:
            self._unsaved.append(record)

    def _record(self, job: Job, split: SplitRef, completion: Completion, result: TaskResult | None) -> EvaluationRecord:
        """What a reply says of one split; without a result the candidate failed there."""
        reply = completion.reply
        return EvaluationRecord(
            phenotype_hash=job.edit.phenotype_hash,
            model_fingerprint=self._model,
            engine_fingerprint=self._engine,
            task_fingerprint=split.fingerprint,
            task=split.task,
            split=split.split,
            metric=split.metric,
            score=None if result is None else result.result.score,
            gold_logprob=None if result is None else result.result.gold_logprob,
            outcomes=None if result is None else result.result.outcomes.astype("<f4").tobytes(),
            examples_seen=0 if result is None else result.result.examples_seen,
            failure=reply.failure if result is None else None,
            seconds=reply.seconds if result is None else result.seconds,
            worker=reply.worker,
            attempt=completion.attempts,
            experts=job.experts,
            active=job.active,
            parameters=job.parameters,
        )
