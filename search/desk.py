"""Evaluations on demand: known ones from the store, the others from the pool, no phenotype ever twice at once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from moevolve.evaluators.early_stopping import Floor, Tally
from moevolve.evaluators.types import Split
from moevolve.search.pool import Completion, Pool
from moevolve.search.stopping import Stop, stop_of
from moevolve.store.records import BoundRecord, EvaluationRecord
from moevolve.store.repository import Store
from moevolve.workers.edits.base import Edit, IdentityEdit
from moevolve.workers.messages import EvaluationRequest, TaskResult


@dataclass(frozen=True, slots=True)
class SplitRef:
    """One prepared split by name and fingerprint."""

    task: str
    split: Split
    fingerprint: str


@dataclass(frozen=True, slots=True)
class Job:
    """A phenotype to be scored on some splits.

    Attributes:
        edit: what to apply.
        splits: where to score it.
        experts, active, parameters: for the record; None for the full model.
        penalty: what the search takes off its score.
        floor: what it has to come to; None scores it whatever comes out.
    """

    edit: Edit
    splits: tuple[SplitRef, ...]
    experts: int | None = None
    active: int | None = None
    parameters: int | None = None
    penalty: float = 0.0
    floor: Floor | None = None

    @property
    def key(self) -> tuple[str, tuple[str, ...]]:
        return self.edit.phenotype_hash, tuple(split.fingerprint for split in self.splits)


@dataclass(frozen=True, slots=True)
class Settled:
    """A job's evaluations, in the order of its splits.

    Attributes:
        evaluations: one per split; those that there are if it was stopped.
        reused: whether all that settles it was known already.
        stop: why it was stopped; None if it wasn't.
    """

    job: Job
    evaluations: tuple[EvaluationRecord, ...] = field(repr=False)
    reused: bool
    stop: Stop | None = None

    @property
    def failure(self) -> str | None:
        """Why the candidate failed, if it did on any split."""
        return next((record.failure for record in self.evaluations if record.failure is not None), None)


class EvaluationDesk:
    """Takes jobs, gives back settled ones.

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
        self._tallies: dict[str, dict[str, Tally]] = {}
        self._unsaved: list[EvaluationRecord] = []
        self._unsaved_bounds: list[BoundRecord] = []
        self._tickets = 0

    @property
    def in_flight(self) -> int:
        return len(self._in_flight)

    def request(self, jobs: Sequence[Job]) -> list[Settled]:
        """Submit jobs; those whose evaluations are all known come back at once.

        A job that is in flight already is not submitted again: it settles once, so callers wait by `Job.key`. If it
        was stopped, that need not do for their own floors: see `stopped`.
        """
        self._look_up(jobs)
        settled = []
        for job in jobs:
            missing = tuple(split.fingerprint for split in job.splits if self._find(job, split) is None)
            if not missing:
                settled.append(self._settle(job, reused=True))
            elif (stopped := self.stopped(job, reused=True)) is not None:
                settled.append(stopped)
            elif job.key not in self._open_keys:
                self._open_keys.add(job.key)
                self._tickets += 1
                ticket = f"{job.edit.phenotype_hash[:12]}-{self._tickets}"
                self._in_flight[ticket] = job
                self._pool.submit(EvaluationRequest(ticket, job.edit, missing, self._floor(job)))
        return settled

    def stopped(self, job: Job, *, reused: bool) -> Settled | None:
        """A job settled by what is known of its phenotype, if that puts its own floor out of reach."""
        if job.floor is None:
            return None
        known = {split.fingerprint: found for split in job.splits if (found := self._find(job, split)) is not None}
        stop = stop_of(job.floor, known, self._tallies.get(job.edit.phenotype_hash, {}))
        return None if stop is None else Settled(job, tuple(known.values()), reused, stop)

    def _floor(self, job: Job) -> Floor | None:
        """The floor to send along: none where a bound from before didn't do, so that no job is stopped twice."""
        floor = job.floor
        if floor is None or job.edit.phenotype_hash in self._tallies:
            return None
        for split in job.splits:
            found = self._find(job, split)
            if found is not None and found.score is not None:
                floor = floor.knowing(split.fingerprint, found.score)
        return floor

    def poll(self, timeout: float) -> list[Settled]:
        """Wait up to `timeout` seconds for the pool and return what settled."""
        return [item for completion in self._pool.poll(timeout) for item in self._complete(completion)]

    def run(self, jobs: Sequence[Job], timeout: float = 1.0) -> Iterable[Settled]:
        """Settle all `jobs`, which have no floors, yielding each as it does."""
        missing = {job.key: job for job in jobs}
        arrived = self.request(jobs)
        while True:
            # Somebody else's floor may have stopped what was on its way already.
            again = [missing[item.job.key] for item in arrived if item.stop is not None and item.job.key in missing]
            for item in arrived:
                if item.stop is None and missing.pop(item.job.key, None) is not None:
                    yield item
            if not missing:
                return
            arrived = self.request(again) if again else self.poll(timeout)

    @property
    def unsaved(self) -> list[EvaluationRecord]:
        """New evaluations that the caller has yet to record."""
        return list(self._unsaved)

    @property
    def unsaved_bounds(self) -> list[BoundRecord]:
        """New bounds of stopped candidates that the caller has yet to record."""
        return list(self._unsaved_bounds)

    def saved(self, count: int, bounds: int = 0) -> None:
        """The first `count` unsaved evaluations and the first so many bounds are recorded."""
        del self._unsaved[:count]
        del self._unsaved_bounds[:bounds]

    def _look_up(self, jobs: Sequence[Job]) -> None:
        unknown = {job.edit.phenotype_hash for job in jobs if any(self._find(job, s) is None for s in job.splits)}
        if not unknown:
            return
        fingerprints = sorted({split.fingerprint for job in jobs for split in job.splits})
        for record in self._store.evaluations(sorted(unknown), self._model, self._engine, fingerprints):
            self._remember(record)
        hopeful = sorted({job.edit.phenotype_hash for job in jobs if job.floor is not None} & unknown)
        for bound in self._store.bounds(hopeful, self._model, self._engine, fingerprints) if hopeful else ():
            self._remember_bound(bound)

    def _remember_bound(self, record: BoundRecord) -> None:
        tallies = self._tallies.setdefault(record.phenotype_hash, {})
        tally = Tally.of(np.frombuffer(record.outcomes, "<f4"))
        # Outcomes are kept rounded; the bound isn't.
        tallies[record.task_fingerprint] = replace(tally, most=record.bound)

    def _find(self, job: Job, split: SplitRef) -> EvaluationRecord | None:
        return self._known.get((job.edit.phenotype_hash, split.fingerprint))

    def _remember(self, record: EvaluationRecord) -> None:
        # Outcomes stay in the store: a long search would fill the driver's memory with them.
        self._known[record.phenotype_hash, record.task_fingerprint] = replace(record, outcomes=None)

    def _settle(self, job: Job, *, reused: bool) -> Settled:
        evaluations = (self._find(job, split) for split in job.splits)
        return Settled(job, tuple(record for record in evaluations if record is not None), reused)

    def _complete(self, completion: Completion) -> list[Settled]:
        reply = completion.reply
        job = self._in_flight.pop(reply.ticket, None)
        if job is None:
            return []
        self._open_keys.discard(job.key)
        found = {result.task_fingerprint: result for result in reply.results}
        for split in job.splits:
            result = found.get(split.fingerprint)
            if self._find(job, split) is None and not (reply.stopped and result is None):
                self._take(self._record(job, split, completion, result))
        if not reply.stopped:
            return [self._settle(job, reused=False)]
        self._take_bound(job, completion)
        stopped = self.stopped(job, reused=False)
        return self.request([job]) if stopped is None else [stopped]

    def _take(self, record: EvaluationRecord) -> None:
        self._remember(record)
        # The unedited model's failure blames no candidate: it isn't stored, so that a resume tries again.
        if record.failure is None or record.phenotype_hash != IdentityEdit().phenotype_hash:
            self._unsaved.append(record)

    def _take_bound(self, job: Job, completion: Completion) -> None:
        """Keep what is known of the split that a candidate was stopped on."""
        partial = completion.reply.partial
        split = next((one for one in job.splits if partial and one.fingerprint == partial.task_fingerprint), None)
        if partial is None or split is None:
            return
        record = BoundRecord(
            phenotype_hash=job.edit.phenotype_hash,
            model_fingerprint=self._model,
            engine_fingerprint=self._engine,
            task_fingerprint=split.fingerprint,
            task=split.task,
            split=split.split,
            bound=partial.result.bound,
            outcomes=partial.result.outcomes.astype("<f4").tobytes(),
            examples_seen=partial.result.examples_seen,
            seconds=partial.seconds,
            worker=completion.reply.worker,
            attempt=completion.attempts,
        )
        self._remember_bound(record)
        self._unsaved_bounds.append(record)

    def _record(self, job: Job, split: SplitRef, completion: Completion, result: TaskResult | None) -> EvaluationRecord:
        """What a reply says of one split; without a result the candidate failed."""
        reply = completion.reply
        return EvaluationRecord(
            phenotype_hash=job.edit.phenotype_hash,
            model_fingerprint=self._model,
            engine_fingerprint=self._engine,
            task_fingerprint=split.fingerprint,
            task=split.task,
            split=split.split,
            score=None if result is None else result.result.score,
            gold_logprob=None if result is None else result.result.gold_logprob,
            outcomes=None if result is None else result.result.outcomes.astype("<f4").tobytes(),
            examples_seen=0 if result is None else result.result.examples_seen,
            failure=(reply.failure or "no result was returned") if result is None else None,
            seconds=reply.seconds if result is None else result.seconds,
            worker=reply.worker,
            attempt=completion.attempts,
            experts=job.experts,
            active=job.active,
            parameters=job.parameters,
        )
