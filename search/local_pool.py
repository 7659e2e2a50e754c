"""A pool without Ray: one evaluator in this process, for single evaluations and for benchmarks."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Protocol, cast

from moevolve.evaluators.types import PreparedSplit
from moevolve.search.pool import Completion
from moevolve.search.sharing import Sharing, can_share, fellows
from moevolve.workers.actor import WorkerInfo
from moevolve.workers.config import POPULATION_SIZES, PopulationSize
from moevolve.workers.messages import EvaluationReply, EvaluationRequest, PopulationChoice


class Evaluator(Protocol):
    """Scores one request, like `EvaluationWorker`."""

    def evaluate(self, request: EvaluationRequest, splits: tuple[PreparedSplit, ...]) -> EvaluationReply: ...


class SharingEvaluator(Evaluator, Protocol):
    """One that scores several requests together, like `EvaluationWorker`."""

    def evaluate_many(
        self, requests: tuple[EvaluationRequest, ...], splits: tuple[PreparedSplit, ...]
    ) -> tuple[EvaluationReply, ...]: ...

    def info(self) -> WorkerInfo: ...

    def choose_population(
        self, request: EvaluationRequest, splits: tuple[PreparedSplit, ...], most: int
    ) -> PopulationChoice: ...

    def share(self, size: int) -> None: ...


class LocalPool:
    """Evaluates one request per poll, or those that share its passes with it, in order of submission.

    Args:
        make: makes the evaluator; called when the first request is polled, so that nothing is loaded in vain.
        splits: prepared splits by fingerprint.
        population: how many share passes, at most, or `auto`; unless it is 1 the evaluator must be a
            `SharingEvaluator`.
    """

    def __init__(
        self, make: Callable[[], Evaluator], splits: Mapping[str, PreparedSplit], population: PopulationSize = 1
    ) -> None:
        self._make = make
        self._evaluator: Evaluator | None = None
        self._splits = dict(splits)
        self._queue: deque[EvaluationRequest] = deque()
        self.sharing = Sharing(population)

    def add_splits(self, splits: Mapping[str, PreparedSplit]) -> None:
        self._splits.update(splits)

    def submit(self, request: EvaluationRequest) -> None:
        self._queue.append(request)

    def poll(self, timeout: float) -> list[Completion]:
        if not self._queue:
            return []
        first = self._queue.popleft()
        splits = tuple(self._splits[fingerprint] for fingerprint in first.splits)
        if self._evaluator is None:
            self._evaluator = self._make()
        if self.sharing.is_open and can_share(first):
            self._settle(cast("SharingEvaluator", self._evaluator), first, splits)
        places = fellows(first, self._queue, self.sharing.size - 1)
        if not places:
            return [Completion(self._evaluator.evaluate(first, splits), attempts=1)]
        party = (first, *(self._queue[place] for place in places))
        for place in reversed(places):
            del self._queue[place]
        replies = cast("SharingEvaluator", self._evaluator).evaluate_many(party, splits)
        return [Completion(reply, attempts=1) for reply in replies]

    def _settle(self, evaluator: SharingEvaluator, first: EvaluationRequest, splits: tuple[PreparedSplit, ...]) -> None:
        self.sharing.settle(
            evaluator.info().hardware, lambda: evaluator.choose_population(first, splits, POPULATION_SIZES[-1])
        )
        evaluator.share(self.sharing.size)

    def close(self) -> None:
        self._queue.clear()
