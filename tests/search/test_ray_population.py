"""The pool on a real Ray with candidates that share passes: a worker that dies with several aboard."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator
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
from moevolve.workers.actor import EvaluationWorker
from moevolve.workers.config import EngineConfig, ModelConfig
from moevolve.workers.edits.eep import EepEdit
from moevolve.workers.messages import EvaluationReply, EvaluationRequest

pytestmark = pytest.mark.slow

# Workers can't import this file: its classes travel by value.
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])

Requests = tuple[EvaluationRequest, ...]


class FaultyWorker(EvaluationWorker):
    """Does what the first word of any of the tickets says."""

    def evaluate(self, request: EvaluationRequest, splits: tuple[PreparedSplit, ...]) -> EvaluationReply:
        return self.evaluate_many((request,), splits)[0]

    def evaluate_many(self, requests: Requests, splits: tuple[PreparedSplit, ...]) -> tuple[EvaluationReply, ...]:
        words = {request.ticket.split()[0] for request in requests}
        if "die" in words:
            os._exit(1)
        if "slow" in words:
            time.sleep(3)
        return super().evaluate_many(requests, splits)


@pytest.fixture(scope="module")
def split(tiny: Any) -> PreparedSplit:
    return prepare_split(load_task(tiny.task), "search")


@pytest.fixture
def pool(tiny: Any, split: PreparedSplit) -> Iterator[RayPool]:
    workers = WorkersSection(count=1, num_cpus=0.5, max_attempts=2)
    model, engine = ModelConfig(path=str(tiny.model), device="cpu"), EngineConfig(population=4)
    with contextlib.chdir(tiny.folder):
        made = RayPool(workers, model, engine, {split.fingerprint: split}, worker=FaultyWorker)
        yield made
        made.close()
        ray.shutdown()


def requests_of(split: PreparedSplit, *tickets: str) -> Requests:
    rng = np.random.default_rng(0)
    made = []
    for ticket in tickets:
        matrices = np.eye(4, dtype=np.float32)[np.stack([rng.permutation(4)[:2] for _ in range(4)])]
        if ticket == "explode":
            made.append(
                EvaluationRequest(ticket, EepEdit(matrices, matrices * np.float32(1e30), 2), (split.fingerprint,))
            )
        else:
            made.append(EvaluationRequest(ticket, EepEdit(matrices, matrices, 2), (split.fingerprint,)))
    return tuple(made)


def collect(pool: RayPool, count: int) -> dict[str, Completion]:
    done: dict[str, Completion] = {}
    deadline = time.monotonic() + 300
    while len(done) < count:
        assert time.monotonic() < deadline, f"only {sorted(done)} completed"
        done |= {completion.reply.ticket: completion for completion in pool.poll(0.5)}
    return done


def test_a_death_is_charged_to_the_guilty_alone(pool: RayPool, split: PreparedSplit) -> None:
    tickets = ("good 1", "die", "good 2", "good 3", "good 4", "explode")
    for request in requests_of(split, *tickets):
        pool.submit(request)
    done = collect(pool, len(tickets))
    assert "killed its worker 2 times" in (done["die"].reply.failure or "")
    assert done["die"].attempts == 3, "once with others aboard, twice alone"
    assert "finite" in (done["explode"].reply.failure or "")
    good = [done[ticket] for ticket in tickets if ticket.startswith("good")]
    assert all(completion.reply.failure is None for completion in good)
    assert [completion.attempts for completion in good] == [2, 2, 2, 1]


def test_a_killed_worker_blames_nobody(pool: RayPool, split: PreparedSplit) -> None:
    first, *others = requests_of(split, "good 0", "slow 1", "good 2", "good 3")
    pool.submit(first)
    victim = int(collect(pool, 1)["good 0"].reply.worker.rpartition("/")[2])
    for request in others:
        pool.submit(request)
    pool.poll(0.5)
    os.kill(victim, signal.SIGKILL)
    done = collect(pool, 3)
    assert all(completion.reply.failure is None for completion in done.values())
    assert not any(completion.reply.worker.endswith(f"/{victim}") for completion in done.values())


def test_what_is_evaluated_together_is_what_is_evaluated_alone(pool: RayPool, tiny: Any, split: PreparedSplit) -> None:
    made = requests_of(split, "a", "b", "c", "d", "e")
    worker = EvaluationWorker(ModelConfig(path=str(tiny.model), device="cpu"), EngineConfig())
    expected = {request.ticket: worker.evaluate(request, (split,)).results[0].result for request in made}
    for request in made:
        pool.submit(request)
    for ticket, completion in collect(pool, len(made)).items():
        result = completion.reply.results[0].result
        assert (result.score, result.gold_logprob) == (expected[ticket].score, expected[ticket].gold_logprob)
        np.testing.assert_array_equal(result.outcomes, expected[ticket].outcomes)
