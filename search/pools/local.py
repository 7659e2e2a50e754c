"""A pool without Ray: one evaluator in this process, for single evaluations, tests and benchmarks."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from functools import cache
from typing import Protocol

from moevolve.evaluators.types import PreparedSplit
from moevolve.search.pools.base import PoolError
from moevolve.workers.contract.edits import Measurement
from moevolve.workers.contract.messages import EvaluationReply, EvaluationRequest, WorkerFault


class Evaluator(Protocol):
    """Scores a request or calibrates, as `EvaluationWorker` does."""

    def evaluate(self, request: EvaluationRequest, splits: tuple[PreparedSplit, ...]) -> EvaluationReply: ...

    def calibrate(self, measurement: Measurement, splits: tuple[PreparedSplit, ...]) -> bytes: ...


class LocalPool:
    """Evaluates one request per poll, in order of submission.

    Args:
        make: Makes the evaluator when it is first needed, so that no model is loaded without use.
        splits: Prepared splits by fingerprint.
    """

    def __init__(self, make: Callable[[], Evaluator], splits: Mapping[str, PreparedSplit]) -> None:
        self._evaluator = cache(make)
        self._splits = dict(splits)
        self._queue: deque[EvaluationRequest] = deque()

    def add_splits(self, splits: Mapping[str, PreparedSplit]) -> None:
        self._splits.update(splits)

    def submit(self, request: EvaluationRequest) -> None:
        self._queue.append(request)

    def poll(self, timeout: float) -> list[EvaluationReply]:
        """Evaluate the next request; PoolError if the evaluator is at fault, since this process has no other."""
        if not self._queue:
            return []
        request = self._queue.popleft()
        splits = tuple(self._splits[fingerprint] for fingerprint in request.fingerprints)
        try:
            return [self._evaluator().evaluate(request, splits)]
        except WorkerFault as error:
            raise PoolError(f"the evaluation failed through no fault of the model: {error}") from error

    def calibrate(
        self,
        measurement: Measurement,
        splits: tuple[PreparedSplit, ...],
        check: Callable[[], object] = lambda: None,
    ) -> bytes:
        """Calibrate in this process, after calling `check` once."""
        check()
        return self._evaluator().calibrate(measurement, splits)

    def resize(self, count: int, at_once: bool = False) -> None:
        """Do nothing: there is one evaluator."""

    def close(self) -> None:
        self._queue.clear()
