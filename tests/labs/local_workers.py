"""A worker in this process for whole searches, and what may stand before it: an interruption, a fault, an onlooker."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count

from moevolve.evaluators.types import PreparedSplit
from moevolve.search.loop.setup import SearchSetup
from moevolve.search.pools.local import Evaluator, LocalPool
from moevolve.workers.contract.edits import Measurement
from moevolve.workers.contract.messages import EvaluationReply, EvaluationRequest
from moevolve.workers.worker import EvaluationWorker

Step = Callable[[Evaluator, EvaluationRequest, tuple[PreparedSplit, ...]], EvaluationReply]
"""Answers a request with a worker's help, or without."""


class Guarded:
    """An evaluator before whom a step stands."""

    def __init__(self, worker: Evaluator, step: Step) -> None:
        self._worker, self._step = worker, step

    def evaluate(self, request: EvaluationRequest, splits: tuple[PreparedSplit, ...]) -> EvaluationReply:
        return self._step(self._worker, request, splits)

    def calibrate(self, measurement: Measurement, splits: tuple[PreparedSplit, ...]) -> bytes:
        return self._worker.calibrate(measurement, splits)


def plainly(worker: Evaluator, request: EvaluationRequest, splits: tuple[PreparedSplit, ...]) -> EvaluationReply:
    return worker.evaluate(request, splits)


def interrupted_after(evaluations: int) -> Step:
    """Ends the process, as Ctrl-C does, instead of making one more evaluation."""
    counted = count()

    def step(worker: Evaluator, request: EvaluationRequest, splits: tuple[PreparedSplit, ...]) -> EvaluationReply:
        if next(counted) >= evaluations:
            raise KeyboardInterrupt
        return worker.evaluate(request, splits)

    return step


def local_pool(setup: SearchSetup, step: Step = plainly) -> LocalPool:
    """The pool of a search's configuration, of one worker in this process."""
    engine, model = setup.config.engine, setup.config.model
    return LocalPool(lambda: Guarded(EvaluationWorker(model, engine), step), setup.all_prepared)
