"""The pool on a real Ray: what reaches its workers, workers that die or are at fault, and a clean import path."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
from light_workers import LightWorker, await_file
from replies import failure
from search_lab import prepared
from waiting import PATIENT_S

from moevolve.evaluators.types import PreparedSplit
from moevolve.search.config.run import WorkersSection
from moevolve.search.pools.ray_pool import RayPool
from moevolve.workers.contract.edits import IdentityEdit
from moevolve.workers.contract.messages import EvaluationReply, EvaluationRequest, WorkerFault
from moevolve.workers.contract.settings import EngineConfig, ModelConfig

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers can't import this file

CHECKOUT = Path(__file__).parents[3]


class TalkingWorker(LightWorker):
    """Does what the ticket says instead of evaluating; `after` answers once the file is there."""

    def evaluate(self, request: EvaluationRequest, splits: tuple[PreparedSplit, ...]) -> EvaluationReply:
        match request.ticket.split():
            case "kernels", *_:
                return failure(request, reason=str(importlib.util.find_spec("kernels")))
            case "split", *_:
                return failure(request, reason=splits[0].task)
            case "fault", *_:
                raise WorkerFault("MemoryError: no more")
            case "after", path, *_:
                await_file(Path(path))
        return super().evaluate(request, splits)


@pytest.fixture(scope="module")
def pool(ray_address: str) -> Iterator[RayPool]:
    """Two workers. Their driver runs in the checkout's folder, the worst place for import paths."""
    workers = WorkersSection(num_cpus=0.5, address=ray_address, count=2, max_attempts=2)
    with contextlib.chdir(CHECKOUT):
        pool = RayPool(workers, ModelConfig("nowhere"), EngineConfig(), {}, worker=TalkingWorker)
        with contextlib.closing(pool):
            yield pool
    ray.shutdown()


def submit(pool: RayPool, *tickets: str) -> None:
    for ticket in tickets:
        pool.submit(EvaluationRequest(IdentityEdit(), (), ticket=ticket))


def collect(pool: RayPool, count: int) -> dict[str, EvaluationReply]:
    done: dict[str, EvaluationReply] = {}
    deadline = time.monotonic() + PATIENT_S
    while len(done) < count:
        assert time.monotonic() < deadline, f"only {sorted(done)} completed"
        done |= {reply.ticket: reply for reply in pool.poll(0.1)}
    return done


def test_workers_get_splits_that_come_later_and_faults_stay_with_their_candidates(pool: RayPool) -> None:
    late = prepared("late", "search")
    pool.add_splits({late.fingerprint: late})
    pool.submit(EvaluationRequest(IdentityEdit(), (late.ref,), ticket="split"))
    submit(pool, "fault", "kernels", "good")
    done = collect(pool, 4)
    assert done["split"].failure == "late" and done["split"].kind == "candidate"
    # Ray puts the driver's folder on its workers' path: the checkout, when a search is launched from there.
    assert str(CHECKOUT) not in (done["kernels"].failure or "")
    assert (done["fault"].kind, done["fault"].attempts) == ("worker", 2)
    assert "killed its worker 2 times, last: WorkerFault: MemoryError: no more" in (done["fault"].failure or "")
    assert (done["good"].failure, done["good"].attempts) == (None, 1)


def test_a_killed_worker_is_replaced_and_its_candidate_evaluated_again(pool: RayPool, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    while pool.ready < 2:
        pool.poll(0.1)
    # The first of two free workers takes both.
    submit(pool, "good")
    victim = int(collect(pool, 1)["good"].worker.rpartition("/")[2])
    submit(pool, f"after {gate}")
    pool.poll(0.1)
    os.kill(victim, signal.SIGKILL)
    gate.touch()
    (done,) = collect(pool, 1).values()
    assert (done.failure, done.attempts) == (None, 2)
    assert not done.worker.endswith(f"/{victim}")
