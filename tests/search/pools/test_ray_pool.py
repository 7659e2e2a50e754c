"""The pool on a real Ray: workers that die, candidates at fault, a node that goes away, and a clean import path."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from light_workers import LightWorker
from replies import failure
from search_lab import prepared
from waiting import PATIENT_S

from moevolve.evaluators.errors import UserError
from moevolve.evaluators.types import PreparedSplit
from moevolve.search.config.run import WorkersSection
from moevolve.search.pools import ray_pool
from moevolve.search.pools.base import Pool, PoolError, StopRequested, check_not_ended
from moevolve.search.pools.ray_pool import RayPool
from moevolve.store.records import Control
from moevolve.workers.contract.edits import IdentityEdit
from moevolve.workers.contract.messages import EvaluationReply, EvaluationRequest
from moevolve.workers.contract.settings import EngineConfig, ModelConfig

pytestmark = pytest.mark.slow

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers can't import this file

ANYTHING: Any = None
"""The recipe of a calibration that nothing is measured for."""
CHECKOUT = Path(__file__).parents[3]


class SearchingWorker(LightWorker):
    """Says besides what it finds under the name of our folder of kernels, and which split it was sent."""

    def evaluate(self, request: EvaluationRequest, splits: tuple[PreparedSplit, ...]) -> EvaluationReply:
        if splits:
            return failure(request, reason=splits[0].task)
        return super().evaluate(request, splits)

    def reply(self, request: EvaluationRequest) -> EvaluationReply:
        if request.ticket == "spec":
            return failure(request, reason=str(importlib.util.find_spec("kernels")))
        return super().reply(request)


@pytest.fixture(scope="module")
def pool(ray_address: str) -> Iterator[RayPool]:
    """Two workers."""
    pool = light_pool(ray_address, SearchingWorker, count=2, max_attempts=2)
    yield pool
    pool.close()


@pytest.fixture(scope="module", autouse=True)
def from_the_checkout() -> Iterator[None]:
    """Drivers run in the checkout's folder, the worst place for import paths; they leave Ray with the module."""
    with contextlib.chdir(CHECKOUT):
        yield
    ray.shutdown()


def collect(pool: Pool, count: int, timeout: float = PATIENT_S) -> dict[str, EvaluationReply]:
    done: dict[str, EvaluationReply] = {}
    deadline = time.monotonic() + timeout
    while len(done) < count:
        assert time.monotonic() < deadline, f"only {sorted(done)} completed"
        done |= {reply.ticket: reply for reply in pool.poll(0.1)}
    return done


def submit(pool: RayPool, *tickets: str) -> None:
    for ticket in tickets:
        pool.submit(EvaluationRequest(IdentityEdit(), (), ticket=ticket))


def limit(pool: RayPool, **limits: float) -> None:
    """Give a pool other limits, where what is to be over at once and what may take its time share it."""
    pool._workers = pool._workers.model_copy(update=limits)


def test_a_model_that_does_not_load_ends_the_pool(
    ray_address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_pool, "_PAUSE_S", 0.1)
    monkeypatch.setattr(ray_pool, "_FAILED_STARTS", 2)
    with (
        contextlib.closing(light_pool(ray_address, fragile(tmp_path, "refuse"), count=1)) as pool,
        pytest.raises(PoolError, match="workers can't start: UserError: not a model for this"),
    ):
        collect(pool, 1)
    assert len(list(tmp_path.iterdir())) == 2, "it was tried again"


def fragile(folder: Path, *fates: str, calibrating: tuple[str, ...] = ()) -> Any:
    """Workers that load no model: the n-th to load has the n-th fate, all further ones have the last one.

    So has the n-th calibration. Until one is fine its process imports nothing, which makes it quick to start.
    """

    class FragileWorker:
        def __init__(self, *_: object) -> None:
            meet(folder, fates)

        def calibrate(self, *_: object) -> bytes:
            meet(folder / "calibrations", calibrating)
            return b"made"

        def info(self, node: str) -> Any:
            from moevolve.workers.contract.messages import WorkerInfo

            return WorkerInfo(f"fragile/{os.getpid()}", node, "cpu")

        def evaluate(self, request: Any, _: object) -> Any:
            from moevolve.workers.contract.messages import EvaluationReply

            return EvaluationReply(request.ticket, {}, "there is no model", 0.0, "fragile")

    return FragileWorker


def meet(folder: Path, fates: tuple[str, ...]) -> None:
    """What becomes of the next one that is counted in a folder."""
    folder.mkdir(exist_ok=True)
    count = 0
    while True:
        with contextlib.suppress(FileExistsError):
            os.close(os.open(folder / str(count), os.O_CREAT | os.O_EXCL))
            break
        count += 1
    match fates[min(count, len(fates) - 1)]:
        case "fail":
            raise RuntimeError("CUDA error: uncorrectable ECC error encountered")
        case "refuse":
            raise UserError("not a model for this")
        case "hang":
            time.sleep(3600)
        case "die":
            os._exit(1)


def light_pool(address: str, worker: Any, **settings: Any) -> RayPool:
    workers = WorkersSection(num_cpus=0.5, address=address, **settings)
    return RayPool(workers, ModelConfig(path="nowhere"), EngineConfig(), {}, worker=worker)


def poll_until(pool: RayPool, true: Callable[[], bool], timeout: float = PATIENT_S) -> None:
    deadline = time.monotonic() + timeout
    while not true():
        assert time.monotonic() < deadline
        pool.poll(0.1)


def test_a_worker_that_can_not_start_is_waited_for_beside_one_that_is_ready(
    ray_address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is started again after pauses that grow, and the search goes on."""
    monkeypatch.setattr(ray_pool, "_PAUSE_S", 0.1)
    monkeypatch.setattr(ray_pool, "_LONGEST_PAUSE_S", 0.15)
    fates = ["fine", "fail", "fail", "fine"]
    with contextlib.closing(light_pool(ray_address, fragile(tmp_path, *fates), count=1)) as pool:
        poll_until(pool, lambda: pool.ready == 1)
        pool.resize(2)
        for number in range(20):
            pool.submit(EvaluationRequest(IdentityEdit(), (), ticket=str(number)))
        assert len(collect(pool, 20)) == 20
        poll_until(pool, lambda: pool.ready == 2)
    said = [record for record in caplog.records if record.levelno == logging.WARNING]
    pauses = [record.args[-2] for record in said if isinstance(record.args, tuple)]
    assert pauses == [0.1, 0.15], "no longer than the longest"
    words = f"worker 2 of 2 can't start on {socket.gethostname()}: RuntimeError: CUDA error"
    assert all(words in record.message and "1 are ready" in record.message for record in said)


def test_a_worker_that_hangs_while_it_loads_is_replaced(
    ray_address: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pool = light_pool(ray_address, fragile(tmp_path, "fine", "hang", "fine"), count=1, start_timeout_s=PATIENT_S)
    with contextlib.closing(pool):
        poll_until(pool, lambda: pool.ready == 1)
        pool.resize(2)
        poll_until(pool, (tmp_path / "1").exists)
        limit(pool, start_timeout_s=1.0)
        poll_until(pool, lambda: "took longer to load than workers.start_timeout_s = 1" in caplog.text)
        limit(pool, start_timeout_s=PATIENT_S)
        poll_until(pool, (tmp_path / "2").exists)


def test_the_pool_ends_when_no_worker_gets_ready_in_time(ray_address: str, tmp_path: Path) -> None:
    """One hangs while it loads, another one finds no room."""
    loading = light_pool(ray_address, fragile(tmp_path, "hang"), count=1, start_timeout_s=PATIENT_S)
    with contextlib.closing(loading):
        poll_until(loading, (tmp_path / "0").exists)
        limit(loading, start_timeout_s=1.0)
        with pytest.raises(PoolError, match=r"after 1 s .*: the model loads slowly"):
            poll_until(loading, lambda: False)
    workers = WorkersSection(num_cpus=64, start_timeout_s=1, address=ray_address)
    waiting = RayPool(workers, ModelConfig(path="nowhere"), EngineConfig(), {})
    with contextlib.closing(waiting), pytest.raises(PoolError, match=r"after 1 s .*: the cluster has no room for num_"):
        poll_until(waiting, lambda: False)


def test_who_waits_for_a_calibration_hears_what_is_asked(ray_address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no room for its worker."""
    monkeypatch.setattr(ray_pool, "_CHECK_S", 0.1)
    asked = iter(["running", "running", "stopped"])

    def check() -> None:
        check_not_ended(Control("somebody", 1, True, next(asked), None))  # type: ignore[arg-type]

    with contextlib.closing(crowded_pool(ray_address, PATIENT_S)) as pool, pytest.raises(StopRequested):
        pool.calibrate(ANYTHING, (), check)
    with (
        contextlib.closing(crowded_pool(ray_address, 0.5)) as pool,
        pytest.raises(PoolError, match=r"no worker was ready after 0\.5 s .*: the cluster has no room for num_cpus=64"),
    ):
        pool.calibrate(ANYTHING, ())


def crowded_pool(address: str, start_timeout_s: float) -> RayPool:
    workers = WorkersSection(num_cpus=64, start_timeout_s=start_timeout_s, address=address)
    return RayPool(workers, ModelConfig(path="nowhere"), EngineConfig(), {})


def test_a_calibration_is_tried_again_when_its_worker_dies(ray_address: str, tmp_path: Path) -> None:
    """Up to `max_attempts`, and only then. Evaluations that are asked for beside it are answered afterwards."""
    fates = ("die", "fine", "die", "die", "refuse", "fail", "hang", "fine")
    worker = fragile(tmp_path, "fine", calibrating=fates)
    pool = light_pool(ray_address, worker, count=1, max_attempts=2, start_timeout_s=PATIENT_S)
    with contextlib.closing(pool):
        poll_until(pool, lambda: pool.ready == 1)
        pool.submit(EvaluationRequest(IdentityEdit(), (), ticket="before"))
        assert pool.calibrate(ANYTHING, ()) == b"made"
        with pytest.raises(
            PoolError, match="the calibration failed: it killed its worker 2 times, last: The actor died"
        ):
            pool.calibrate(ANYTHING, ())
        with pytest.raises(UserError, match=r"^not a model for this$"):
            pool.calibrate(ANYTHING, ())
        with pytest.raises(PoolError, match="the calibration failed: RuntimeError: CUDA error"):
            pool.calibrate(ANYTHING, ())
        assert collect(pool, 1).keys() == {"before"}
        poll_until(pool, lambda: pool.ready == 1)
        limit(pool, start_timeout_s=0.5)
        with pytest.raises(
            PoolError, match=r"longer than 0\.5 s; raise workers\.start_timeout_s, or .* \(genome\.calibration_tokens\)"
        ):
            pool.calibrate(ANYTHING, ())
        limit(pool, start_timeout_s=PATIENT_S)
        assert pool.calibrate(ANYTHING, ()) == b"made"


def test_a_model_that_does_not_load_is_not_calibrated(ray_address: str, tmp_path: Path) -> None:
    with (
        contextlib.closing(light_pool(ray_address, fragile(tmp_path, "refuse"), count=1)) as pool,
        pytest.raises(UserError, match=r"^not a model for this$"),
    ):
        pool.calibrate(ANYTHING, ())


def test_our_kernels_folder_is_not_importable_by_its_bare_name(pool: RayPool) -> None:
    """Ray puts the driver's folder on its workers' path: the checkout, when a search is launched from there."""
    submit(pool, "spec")
    assert str(CHECKOUT) not in (collect(pool, 1)["spec"].failure or "")


def test_a_split_that_is_added_later_reaches_a_worker(pool: RayPool) -> None:
    """As comparisons add them, whose searches share workers."""
    late = prepared("late", "search")
    pool.add_splits({late.fingerprint: late})
    pool.submit(EvaluationRequest(IdentityEdit(), (late.ref,), ticket="split"))
    assert collect(pool, 1)["split"].failure == "late"


def test_faults_stay_with_their_candidates(pool: RayPool) -> None:
    """One that kills its worker, one that takes all its memory, one that does not fit."""
    tickets = ["die", "fault", "misfit", "good 1", "good 2"]
    submit(pool, *tickets)
    done = collect(pool, len(tickets))
    for ticket in ("die", "fault"):
        assert "killed its worker 2 times" in (done[ticket].failure or "") and done[ticket].kind == "worker"
        assert done[ticket].attempts == 2
    assert "MemoryError: no more" in (done["fault"].failure or "")
    assert done["misfit"].failure and done["misfit"].kind == "candidate"
    assert {(done[ticket].failure, done[ticket].attempts) for ticket in ("good 1", "good 2")} == {(None, 1)}


def test_a_killed_worker_is_replaced_and_its_candidate_evaluated_again(pool: RayPool, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    poll_until(pool, lambda: pool.ready == 2)
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


def test_an_evaluation_past_its_time_fails(pool: RayPool) -> None:
    before = pool._workers
    limit(pool, timeout_s=1.0, max_attempts=1)
    submit(pool, "hang")
    done = collect(pool, 1)["hang"]
    pool._workers = before
    assert "longer than workers.timeout_s = 1" in (done.failure or "") and done.kind == "timeout"


def test_workers_that_are_too_many_end_their_evaluations(pool: RayPool, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    after = [f"after {gate} {number}" for number in range(4)]
    poll_until(pool, lambda: pool.ready == 2)
    submit(pool, *after)
    pool.resize(1)
    assert pool.ready == 2, "both evaluate something"
    gate.touch()
    done = collect(pool, 4)
    assert pool.ready == 1 and {item.attempts for item in done.values()} == {1}
    gate.unlink()
    submit(pool, *after[:2])
    pool.resize(0, at_once=True)
    assert pool.ready == 0 and pool.poll(0.1) == []
    gate.touch()
    pool.resize(2)
    assert {item.attempts for item in collect(pool, 2).values()} == {1}, "they are charged for nothing"
