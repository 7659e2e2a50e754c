"""The pool on a real Ray with candidates that share passes: a worker that dies with several aboard."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import ray

from moevolve.evaluators.prepare import prepare_split
from moevolve.evaluators.registry import load_task
from moevolve.evaluators.types import PreparedSplit
from moevolve.search.config import WorkersSection
from moevolve.search.pool import Completion
from moevolve.search.ray_pool import RayPool
from moevolve.workers.actor import EvaluationWorker, WorkerInfo
from moevolve.workers.config import EngineConfig, ModelConfig
from moevolve.workers.edits.eep import EepEdit
from moevolve.workers.messages import EvaluationReply, EvaluationRequest, PopulationChoice

pytestmark = pytest.mark.slow

# Workers can't import this file: its classes travel by value.
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])

Requests = tuple[EvaluationRequest, ...]


class FaultyWorker(EvaluationWorker):
    """Dies of a ticket; says that it measured four to be the best, on hardware that others don't have."""

    def info(self, node: str = "") -> WorkerInfo:
        return replace(super().info(node), hardware="a device")

    def choose_population(
        self, request: EvaluationRequest, splits: tuple[PreparedSplit, ...], most: int
    ) -> PopulationChoice:
        return replace(super().choose_population(request, splits, most), size=4, hardware="a device")

    def evaluate(self, request: EvaluationRequest, splits: tuple[PreparedSplit, ...]) -> EvaluationReply:
        return self.evaluate_many((request,), splits)[0]

    def evaluate_many(self, requests: Requests, splits: tuple[PreparedSplit, ...]) -> tuple[EvaluationReply, ...]:
        if any(request.ticket == "die" for request in requests):
            os._exit(1)
        assert self._population is not None and self._population.size == 4
        return super().evaluate_many(requests, splits)


@pytest.fixture(scope="module")
def split(tiny: Any) -> PreparedSplit:
    return prepare_split(load_task(tiny.task), "search")


@pytest.fixture
def pool(tiny: Any, split: PreparedSplit) -> Iterator[RayPool]:
    workers = WorkersSection(count=1, num_cpus=0.5, max_attempts=1)
    model, splits = ModelConfig(path=str(tiny.model), device="cpu"), {split.fingerprint: split}
    with contextlib.chdir(tiny.folder):
        made = RayPool(workers, model, EngineConfig(), splits, worker=FaultyWorker, in_flight=7)
        yield made
        made.close()
        ray.shutdown()


def requests_of(split: PreparedSplit, *tickets: str) -> Requests:
    rng = np.random.default_rng(0)
    made = []
    for ticket in tickets:
        matrices = np.eye(4, dtype=np.float32)[np.stack([rng.permutation(4)[:2] for _ in range(4)])]
        merging = matrices * np.float32(1e30) if ticket == "explode" else matrices
        made.append(EvaluationRequest(ticket, EepEdit(matrices, merging, 2), (split.fingerprint,)))
    return tuple(made)


def collect(pool: RayPool, count: int) -> dict[str, Completion]:
    done: dict[str, Completion] = {}
    deadline = time.monotonic() + 300
    while len(done) < count:
        assert time.monotonic() < deadline, f"only {sorted(done)} completed"
        done |= {completion.reply.ticket: completion for completion in pool.poll(0.5)}
    return done


def test_candidates_together_and_a_death_among_them(pool: RayPool, tiny: Any, split: PreparedSplit) -> None:
    """Measured once; those with a dead worker aboard go alone to the next one; all get what they get elsewhere."""
    good = ("good 1", "good 2", "good 3", "good 4", "good 5", "good 6", "good 7")
    tickets = (*good[:4], "explode", *good[4:], "die")
    made = requests_of(split, *tickets)
    for request in made:
        pool.submit(request)
    assert pool.sharing.is_open
    done = collect(pool, len(tickets))
    choice = pool.sharing.choice
    assert choice is not None and choice.size == pool.sharing.size == 4
    assert [size for size, _ in choice.seconds] == [1, 2, 4]
    assert "no more than 7 candidates" in choice.ended

    assert "killed its worker 1 times" in (done["die"].reply.failure or "")
    assert done["die"].attempts == 2, "once with others aboard, once alone"
    assert "finite" in (done["explode"].reply.failure or "")
    assert [done[ticket].attempts for ticket in good] == [1] * 4 + [2] * 3
    assert len({done[ticket].reply.worker for ticket in good}) == 2
    worker = EvaluationWorker(ModelConfig(path=str(tiny.model), device="cpu"), EngineConfig())
    for request in made:
        if request.ticket in good:
            expected = worker.evaluate(request, (split,)).results[0].result
            reply = done[request.ticket].reply
            assert reply.failure is None
            found = reply.results[0].result
            assert (found.score, found.gold_logprob) == (expected.score, expected.gold_logprob)
            np.testing.assert_array_equal(found.outcomes, expected.outcomes)
