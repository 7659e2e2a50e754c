"""Workers that stay up from one search of a comparison to the next."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from moevolve.evaluators.types import PreparedSplit
from moevolve.search.plan import Plan
from moevolve.search.pool import Completion, Pool
from moevolve.workers.config import EngineConfig, ModelConfig
from moevolve.workers.messages import EvaluationRequest


class GrowingPool(Pool, Protocol):
    """A pool that more task splits can be given to."""

    def add_splits(self, splits: Mapping[str, PreparedSplit]) -> None:
        """Make prepared splits known, by fingerprint."""
        ...


class SharedWorkers:
    """One pool for searches on the same model and engine; it starts when something is evaluated for the first time.

    Args:
        make: starts a pool for a plan.
    """

    def __init__(self, make: Callable[[Plan], GrowingPool]) -> None:
        self._make = make
        self._pool: GrowingPool | None = None
        self._loaded: tuple[ModelConfig, EngineConfig] | None = None

    def lend(self, plan: Plan) -> Pool:
        """A pool for one search; closing it leaves the workers up."""
        return _Lent(self, plan)

    def pool(self, plan: Plan) -> GrowingPool:
        """The pool, with the plan's model loaded and its task splits known."""
        wanted = plan.config.model.to_worker(), plan.config.engine.to_worker()
        if self._pool is not None and self._loaded != wanted:
            self.close()
        if self._pool is None:
            self._pool, self._loaded = self._make(plan), wanted
        else:
            self._pool.add_splits(plan.all_prepared)
        return self._pool

    def close(self) -> None:
        """Stop the workers; what they were doing is dropped."""
        if self._pool is not None:
            self._pool.close()
        self._pool = None


class _Lent:
    def __init__(self, workers: SharedWorkers, plan: Plan) -> None:
        self._workers = workers
        self._plan = plan
        self._pool: Pool | None = None

    def submit(self, request: EvaluationRequest) -> None:
        if self._pool is None:
            self._pool = self._workers.pool(self._plan)
        self._pool.submit(request)

    def poll(self, timeout: float) -> list[Completion]:
        return [] if self._pool is None else self._pool.poll(timeout)

    def close(self) -> None:
        self._pool = None
