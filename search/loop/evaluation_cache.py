"""Evaluations on demand: known ones come from the store, others from the pool, and no phenotype runs twice at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from moevolve.evaluators.errors import FailureKind
from moevolve.evaluators.types import SplitRef, SplitResult
from moevolve.search.pools.base import Pool
from moevolve.store.records import FULL_MODEL, EvaluationRecord, IndividualRecord, Lease
from moevolve.store.repository import Store
from moevolve.workers.contract.messages import EvaluationReply, EvaluationRequest


@dataclass(frozen=True, slots=True)
class CachedResult:
    """A request with its outcome.

    Attributes:
        evaluations: Evaluations in the order of the request's splits; a failed request may lack some.
        reused: True if the outcome was known before the request.
        failure: Reason of the failure; None for success.
    """

    request: EvaluationRequest
    evaluations: tuple[EvaluationRecord, ...] = field(repr=False)
    reused: bool
    failure: str | None = None
    failure_kind: FailureKind | None = None


class EvaluationCache:
    """Settles evaluation requests with stored evaluations or with new ones from a pool.

    An evaluation is a function of phenotype, split and settings. A candidate that fails on one split keeps its scores
    on the splits before, and isn't evaluated on those after. A failure that isn't the candidate's own (lost workers, a
    timeout) settles the request but isn't stored, so a later request evaluates the candidate again.

    Args:
        writer: Lease or id of the search that records new evaluations; None records them without a search.
        model_fingerprint: Fingerprint of the checkpoint.
        engine_fingerprint: Fingerprint of the engine's settings.
    """

    def __init__(
        self, store: Store, pool: Pool, writer: str | Lease | None, model_fingerprint: str, engine_fingerprint: str
    ) -> None:
        self._store, self._pool, self._writer = store, pool, writer
        self._model, self._engine = model_fingerprint, engine_fingerprint
        self._known: dict[tuple[str, str], EvaluationRecord] = {}
        self._in_flight: dict[str, EvaluationRequest] = {}
        self._open_keys: set[tuple[str, tuple[str, ...]]] = set()
        self._unsaved: list[EvaluationRecord] = []
        self._tickets = 0

    def request(self, requests: Sequence[EvaluationRequest]) -> list[CachedResult]:
        """Submit requests, and return those whose outcome is known.

        A request that is in flight isn't submitted again. It settles once, so callers wait for its `key`.
        """
        self._look_up(requests)
        settled = []
        for request in requests:
            missing = tuple(split for split in request.splits if self._find(request, split) is None)
            if not missing or self._known_failure(request) is not None:
                settled.append(self._settle(request, reused=True))
            elif request.key not in self._open_keys:
                self._open_keys.add(request.key)
                self._tickets += 1
                ticket = f"{request.edit.phenotype_hash[:12]}-{self._tickets}"
                self._in_flight[ticket] = request
                self._pool.submit(replace(request, splits=missing, ticket=ticket))
        return settled

    def poll(self, timeout: float) -> list[CachedResult]:
        """Wait up to `timeout` seconds for the pool, and return the requests that are settled."""
        return [item for reply in self._pool.poll(timeout) for item in self._complete(reply)]

    def settle(self, requests: Sequence[EvaluationRequest]) -> list[CachedResult]:
        """Settle all requests, in any order; what has arrived is recorded even if an error ends the wait."""
        missing = {request.key: request for request in requests}
        settled = []
        try:
            arrived = self.request(requests)
            while True:
                settled += [item for item in arrived if missing.pop(item.request.key, None) is not None]
                if not missing:
                    return settled
                arrived = self.poll(timeout=1.0)
        finally:
            self.record()

    def record(self, individuals: Sequence[IndividualRecord] = ()) -> None:
        """Write the individuals and all new evaluations in one transaction."""
        unsaved = list(self._unsaved)  # kept until the transaction has succeeded
        if individuals or unsaved:
            if self._writer is None:
                self._store.add_evaluations(unsaved)
            else:
                self._store.record(self._writer, individuals, unsaved)
            del self._unsaved[: len(unsaved)]

    def _look_up(self, requests: Sequence[EvaluationRequest]) -> None:
        unknown: set[str] = set()
        fingerprints: set[str] = set()
        for request in requests:
            if any(self._find(request, split) is None for split in request.splits):
                unknown.add(request.edit.phenotype_hash)
                fingerprints.update(request.fingerprints)
        if unknown:
            found = self._store.evaluations(sorted(unknown), self._model, self._engine, sorted(fingerprints))
            for record in found:
                self._remember(record)

    def _find(self, request: EvaluationRequest, split: SplitRef) -> EvaluationRecord | None:
        return self._known.get((request.edit.phenotype_hash, split.fingerprint))

    def _known_failure(self, request: EvaluationRequest) -> str | None:
        """Return the reason if the candidate failed by its own fault on one of the request's splits."""
        records = (self._find(request, split) for split in request.splits)
        return next((one.failure for one in records if one is not None and one.failure is not None), None)

    def _remember(self, record: EvaluationRecord) -> None:
        # Outcomes stay in the store: a long search would fill the driver's memory with them.
        self._known[record.phenotype_hash, record.task_fingerprint] = replace(record, outcomes=None)

    def _settle(self, request: EvaluationRequest, *, reused: bool) -> CachedResult:
        found = (self._find(request, split) for split in request.splits)
        records = tuple(record for record in found if record is not None)
        failure = self._known_failure(request)
        return CachedResult(request, records, reused, failure, None if failure is None else "candidate")

    def _complete(self, reply: EvaluationReply) -> list[CachedResult]:
        request = self._in_flight.pop(reply.ticket, None)
        if request is None:
            return []
        self._open_keys.discard(request.key)
        for split in request.splits:
            result = reply.results.get(split.fingerprint)
            failed = reply.kind == "candidate" and split.fingerprint in reply.failed_on
            if self._find(request, split) is None and (result is not None or failed):
                record = self._record_of(request, split, reply, result)
                self._remember(record)
                # A failure of the unedited model isn't stored, so that a resume evaluates it again.
                if result is not None or record.phenotype_hash != FULL_MODEL:
                    self._unsaved.append(record)
        settled = self._settle(request, reused=False)
        if settled.failure is None and len(settled.evaluations) < len(request.splits):
            settled = replace(settled, failure=reply.failure or "no result was returned", failure_kind=reply.kind)
        return [settled]

    def _record_of(
        self, request: EvaluationRequest, split: SplitRef, reply: EvaluationReply, result: SplitResult | None
    ) -> EvaluationRecord:
        """Return the evaluation of one split; without a result it is a failure."""
        return EvaluationRecord(
            phenotype_hash=request.edit.phenotype_hash,
            model_fingerprint=self._model,
            engine_fingerprint=self._engine,
            task_fingerprint=split.fingerprint,
            task=split.task,
            split=split.split,
            metric=split.metric,
            score=None if result is None else result.score,
            gold_logprob=None if result is None else result.gold_logprob,
            outcomes=None if result is None else result.outcomes.astype("<f4").tobytes(),
            examples_seen=0 if result is None else result.examples_seen,
            failure=reply.failure if result is None else None,
            seconds=reply.seconds if result is None else result.seconds,
            worker=reply.worker,
            attempt=reply.attempts,
            experts=request.experts,
            active=request.active,
            parameters=request.parameters,
            active_parameters=request.active_parameters,
        )
