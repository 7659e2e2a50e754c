"""What a pool does about workers that fail, hang or find no room: its rules, on a stand-in for Ray with its own clock."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from replies import answer
from ray.exceptions import ActorDiedError, RayTaskError

from moevolve.evaluators.errors import UserError
from moevolve.search.config.run import WorkersSection
from moevolve.search.pools import ray_actor, ray_pool
from moevolve.search.pools.base import PoolError, StopRequested
from moevolve.search.pools.ray_pool import RayPool
from moevolve.workers.contract.edits import IdentityEdit
from moevolve.workers.contract.messages import EvaluationReply, EvaluationRequest, WorkerFault, WorkerInfo
from moevolve.workers.contract.settings import EngineConfig, ModelConfig

ANYTHING: Any = None
"""The recipe of a calibration that nothing is measured for."""


class Dies(Exception):
    """A worker's process ends."""


class Hangs(Exception):
    """A call never ends."""


class Waits(Exception):
    """A call has not ended yet."""


class Call:
    """A call of an actor's method, and what came of it."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make: Callable[[], Any] | None = make
        self.value: Any = None
        self.error: Exception | None = None

    def ended(self) -> bool:
        if self._make is None or self.value is not None or self.error is not None:
            return self._make is not None
        try:
            self.value = self._make()
        except Waits:
            return False
        except Hangs:
            self._make = None
            return False
        except Dies:
            self.error = ActorDiedError()
        except Exception as error:
            self.error = RayTaskError("call", "", error)
        return True


class Handle:
    """An actor's handle: each method has a `remote`."""

    def __init__(self, ray: StandIn, actor: object, place: str) -> None:
        self._ray, self._actor, self._place = ray, actor, place

    def __getattr__(self, method: str) -> SimpleNamespace:
        return SimpleNamespace(remote=lambda *arguments: Call(lambda: self._made(method, arguments)))

    def _made(self, method: str, arguments: tuple[Any, ...]) -> Any:
        if self._ray.full:
            raise Waits
        self._ray.place = self._place
        return getattr(self._actor, method)(*arguments)


class StandIn:
    """As much of Ray as a pool uses, in this process: calls are made when they are waited for, and waits take no time.

    Attributes:
        nodes_left: Ids of the living nodes; an actor gets the first one that its selector does not exclude.
        full: Whether there is no room for an actor.
        place: Node of the actor that is called.
        waited: Seconds that waits would have taken.
    """

    def __init__(self) -> None:
        self.nodes_left = ["first"]
        self.full = False
        self.waited = 0.0
        self.place = ""

    def remote(self, **_: float) -> Callable[[type], SimpleNamespace]:
        def decorate(make: type, label_selector: Any = None) -> SimpleNamespace:
            excluded = str((label_selector or {}).values())
            place = next((node for node in self.nodes_left if node not in excluded), "lost")
            return SimpleNamespace(
                remote=lambda: Handle(self, make(), place), options=lambda **options: decorate(make, **options)
            )

        return decorate

    def wait(self, calls: list[Call], num_returns: int, timeout: float) -> tuple[list[Call], list[Call]]:
        done = [call for call in calls if call.ended()]
        if not done:
            self.sleep(timeout)
        return done[:num_returns], []

    def get(self, call: Call) -> Any:
        if call.error is not None:
            raise call.error
        return call.value

    def put(self, value: object) -> Call:
        done = Call(lambda: value)
        assert done.ended()
        return done

    def kill(self, actor: object) -> None: ...

    def nodes(self) -> list[dict[str, Any]]:
        return [{"NodeID": node, "Alive": True, "Resources": {"CPU": 8.0}} for node in self.nodes_left]

    def get_runtime_context(self) -> SimpleNamespace:
        return SimpleNamespace(get_node_id=lambda: self.place)

    def monotonic(self) -> float:
        return time.monotonic() + self.waited

    def sleep(self, seconds: float) -> None:
        self.waited += seconds


@dataclass
class Fates:
    """What becomes of workers when they start, calibrate and evaluate, in this order; what is not named goes well.

    Attributes:
        closed: Whether evaluations wait.
        starts: Number of starts.
    """

    starting: list[str] = field(default_factory=list)
    calibrating: list[str] = field(default_factory=list)
    evaluating: list[str] = field(default_factory=list)
    closed: bool = False
    starts: int = 0

    def __call__(self, *_: object) -> Fates:
        self.starts += 1
        meet(self.starting)
        return self

    def info(self, node: str) -> WorkerInfo:
        return WorkerInfo("worker", node, "cpu")

    def calibrate(self, *_: object) -> bytes:
        meet(self.calibrating)
        return b"made"

    def evaluate(self, request: EvaluationRequest, _: object) -> EvaluationReply:
        if self.closed:
            raise Waits
        meet(self.evaluating)
        return answer(request)


def meet(fates: list[str]) -> None:
    match fates.pop(0) if fates else "fine":
        case "die":
            raise Dies
        case "hang":
            raise Hangs
        case "fail":
            raise RuntimeError("CUDA error: uncorrectable ECC error encountered")
        case "fault":
            raise WorkerFault("MemoryError: no more")
        case "refuse":
            raise UserError("not a model for this")


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    found = StandIn()
    for module in (ray_actor, ray_pool):
        monkeypatch.setattr(module, "ray", found)
    monkeypatch.setattr(ray_pool, "time", found)
    monkeypatch.setattr(ray_pool, "start_ray", lambda *_: None)
    return found


def pool_of(fates: Fates, **settings: Any) -> RayPool:
    return RayPool(WorkersSection(**settings), ModelConfig("nowhere"), EngineConfig(), {}, worker=fates)


def poll_until(pool: RayPool, true: Callable[[], bool]) -> None:
    for _ in range(100_000):
        if true():
            return
        pool.poll(0.1)
    raise AssertionError("it does not come to that")


def collect(pool: RayPool, *tickets: str) -> list[EvaluationReply]:
    """The replies to requests of these tickets, which are submitted, in this order."""
    for ticket in tickets:
        pool.submit(EvaluationRequest(IdentityEdit(), (), ticket=ticket))
    return answered(pool, *tickets)


def answered(pool: RayPool, *tickets: str) -> list[EvaluationReply]:
    done: dict[str, EvaluationReply] = {}
    for _ in range(100_000):
        done |= {reply.ticket: reply for reply in pool.poll(0.1)}
        if len(done) == len(tickets):
            break
    return [done[ticket] for ticket in tickets]


def test_a_pool_ends_when_all_starts_of_its_workers_fail(stand_in: StandIn) -> None:
    fates = Fates(starting=["refuse"] * 9)
    with pytest.raises(PoolError, match="workers can't start: UserError: not a model for this"):
        collect(pool_of(fates), "one")
    assert fates.starts == 3 and 2.9 < stand_in.waited < 4, "after one second, and after two more"


def test_a_worker_that_can_not_start_is_waited_for_beside_one_that_is_ready(caplog: pytest.LogCaptureFixture) -> None:
    """It is started again after pauses that grow, and the search goes on."""
    pool = pool_of(Fates(starting=["fine", *["fail"] * 8]))
    poll_until(pool, lambda: pool.ready == 1)
    pool.resize(2)
    collect(pool, *map(str, range(20)))
    poll_until(pool, lambda: pool.ready == 2)
    said = [record for record in caplog.records if record.levelno == logging.WARNING and "can't start" in record.message]
    pauses = [record.args[-2] for record in said if isinstance(record.args, tuple)]
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60], "no longer than the longest"
    words = f"worker 2 of 2 can't start on {socket.gethostname()}: RuntimeError: CUDA error"
    assert all(words in record.message and "1 are ready" in record.message for record in said)


def test_a_worker_that_hangs_while_it_loads_is_replaced(stand_in: StandIn, caplog: pytest.LogCaptureFixture) -> None:
    pool = pool_of(Fates(starting=["fine", "hang"]), start_timeout_s=100)
    poll_until(pool, lambda: pool.ready == 1)
    pool.resize(2)
    poll_until(pool, lambda: pool.ready == 2)
    assert 100 < stand_in.waited < 102
    assert "took longer to load than workers.start_timeout_s = 100" in caplog.text


def test_a_pool_ends_when_no_worker_gets_ready_in_time(stand_in: StandIn) -> None:
    with pytest.raises(PoolError, match=r"after 50 s .*: the model loads slowly"):
        collect(pool_of(Fates(starting=["hang"]), start_timeout_s=50), "one")
    assert 50 <= stand_in.waited < 51
    stand_in.full = True
    with pytest.raises(PoolError, match=r"after 50 s .*: the cluster has no room for num_cpus=64"):
        pool_of(Fates(), start_timeout_s=50, num_cpus=64).calibrate(ANYTHING, ())


def test_who_waits_for_a_calibration_hears_what_is_asked(stand_in: StandIn) -> None:
    stand_in.full, asked = True, list[float]()

    def check() -> None:
        asked.append(stand_in.waited)
        if len(asked) == 3:
            raise StopRequested("interrupted")

    with pytest.raises(StopRequested):
        pool_of(Fates()).calibrate(ANYTHING, (), check)
    assert asked == [0, 1, 2]


def test_a_calibration_is_tried_again_when_its_worker_dies(stand_in: StandIn) -> None:
    """Up to `max_attempts`, and only then. Evaluations that are asked for beside it are answered afterwards."""
    fates = Fates(calibrating=["die", "fine", "die", "die", "refuse", "fail", "fine", "hang"])
    pool = pool_of(fates, max_attempts=2, start_timeout_s=100)
    pool.submit(EvaluationRequest(IdentityEdit(), (), ticket="before"))
    assert pool.calibrate(ANYTHING, ()) == b"made" and fates.starts == 2
    with pytest.raises(PoolError, match="the calibration failed: it killed its worker 2 times, last: The actor died"):
        pool.calibrate(ANYTHING, ())
    with pytest.raises(UserError, match=r"^not a model for this$"):
        pool.calibrate(ANYTHING, ())
    with pytest.raises(PoolError, match="the calibration failed: RuntimeError: CUDA error"):
        pool.calibrate(ANYTHING, ())
    assert pool.calibrate(ANYTHING, ()) == b"made" and len(answered(pool, "before")) == 1
    before = stand_in.waited
    with pytest.raises(PoolError, match=r"longer than 100 s; raise workers\.start_timeout_s, or .*calibration_tokens"):
        pool.calibrate(ANYTHING, ())
    assert stand_in.waited - before >= 100
    with pytest.raises(UserError, match=r"^not a model for this$"):
        pool_of(Fates(starting=["refuse"])).calibrate(ANYTHING, ())


def test_an_evaluation_has_so_many_attempts_and_so_much_time() -> None:
    fates = Fates(evaluating=["die", "fault", "fine", "hang", "fine", "hang", "hang"])
    pool = pool_of(fates, max_attempts=2, timeout_s=10)
    lost, good, again, late = (collect(pool, ticket)[0] for ticket in ("lost", "good", "again", "late"))
    assert (lost.kind, lost.attempts) == ("worker", 2)
    assert "killed its worker 2 times, last: WorkerFault: MemoryError: no more" in (lost.failure or "")
    assert (good.failure, good.attempts, again.failure, again.attempts) == (None, 1, None, 2)
    assert (late.kind, late.attempts) == ("timeout", 2) and "longer than workers.timeout_s = 10" in (late.failure or "")


def test_workers_that_are_lost_with_their_nodes_count_against_nobody_for_long(stand_in: StandIn) -> None:
    stand_in.nodes_left = []
    pool = pool_of(Fates(evaluating=["die"] * 15), max_attempts=1)
    failed, good = collect(pool, "one", "two")
    assert "lost its worker 10 times" in (failed.failure or "") and (good.failure, good.attempts) == (None, 6)


def test_workers_that_are_too_many_end_their_evaluations() -> None:
    fates, tickets = Fates(closed=True), [f"ticket {number}" for number in range(4)]
    pool = pool_of(fates, count=2)
    poll_until(pool, lambda: pool.ready == 2)
    for ticket in tickets:
        pool.submit(EvaluationRequest(IdentityEdit(), (), ticket=ticket))
    pool.resize(1)
    assert pool.ready == 2, "both evaluate something"
    fates.closed = False
    assert {item.attempts for item in answered(pool, *tickets)} == {1} and pool.ready == 1
    fates.closed = True
    pool.submit(EvaluationRequest(IdentityEdit(), (), ticket="last"))
    pool.resize(0, at_once=True)
    assert pool.ready == 0 and pool.poll(0.1) == []
    fates.closed = False
    pool.resize(2)
    assert [item.attempts for item in answered(pool, "last")] == [1], "it is charged for nothing"


def test_a_node_where_three_starts_in_a_row_failed_is_left_out(stand_in: StandIn) -> None:
    stand_in.nodes_left.append("second")
    fates, told = Fates(starting=["fail"] * 3), list[str]()
    pool = RayPool(WorkersSection(), ModelConfig("nowhere"), EngineConfig(), {}, fates, on_left_out=told.append)
    poll_until(pool, lambda: pool.ready == 1)
    assert fates.starts == 4 and pool._seats[0].node == "second"
    assert len(told) == 1 and told[0].startswith(f"3 workers in a row failed on {socket.gethostname()}, the last by Ru")
