"""What a pool does about workers that fail, hang or find no room: its rules, on a stand-in for Ray."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from ray.exceptions import ActorDiedError, RayError, RayTaskError
from replies import answer

from moevolve.evaluators.errors import UserError
from moevolve.evaluators.types import Matching, PreparedSplit
from moevolve.search.config.run import WorkersSection
from moevolve.search.pools import ray_actor, ray_pool
from moevolve.search.pools.base import PoolError, StopRequested
from moevolve.search.pools.ray_pool import RayPool
from moevolve.workers.contract.edits import IdentityEdit
from moevolve.workers.contract.messages import EvaluationReply, EvaluationRequest, WorkerFault, WorkerInfo
from moevolve.workers.contract.settings import EngineConfig, ModelConfig

ANYTHING: Any = None
"""The measurement of a calibration that nothing is measured for."""


class Hangs(Exception):
    """A call never ends."""


FINE = None
DIE, HANG, REFUSE = ActorDiedError(), Hangs(), UserError("not a model for this")
FAIL, FAULT = RuntimeError("CUDA error: uncorrectable ECC error"), WorkerFault("MemoryError: no more")


class Call:
    """A call of an actor's method, which is made when it is first waited for."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make

    @cached_property
    def result(self) -> Any:
        """A value, an error, or None if there will be none."""
        try:
            return self._make()
        except Hangs:
            return None
        except RayError as error:
            return error
        except Exception as error:  # noqa: BLE001 - Ray, too, hands on whatever a worker raises
            return RayTaskError("call", "", error)


class StandIn:
    """As much of Ray as a pool uses, in this process; waits take no time.

    Attributes:
        living: Ids of the living nodes; actors get the first one.
        full: Whether actors find no room.
        waited: Seconds that waits would have taken.
    """

    def __init__(self) -> None:
        self.living = ["first"]
        self.full = False
        self.waited = 0.0
        self._node = ""

    def remote(self, **_: float) -> Callable[[type], SimpleNamespace]:
        return self._actor_class

    def _actor_class(self, make: type) -> SimpleNamespace:
        def create() -> SimpleNamespace:
            actor, node = make(), next(iter(self.living), "lost")
            methods = [name for name in vars(make) if not name.startswith("_")]
            return SimpleNamespace(**{name: self._method(getattr(actor, name), node) for name in methods})

        return SimpleNamespace(remote=create)

    def _method(self, method: Callable[..., Any], node: str) -> SimpleNamespace:
        def make(*arguments: Any) -> Any:
            if self.full:
                raise Hangs
            self._node = node
            return method(*arguments)

        return SimpleNamespace(remote=lambda *arguments: Call(lambda: make(*arguments)))

    def wait(self, calls: list[Call], num_returns: int, timeout: float) -> tuple[list[Call], list[Call]]:
        done = [call for call in calls if call.result is not None]
        if not done:
            self.sleep(timeout)
        return done[:num_returns], []

    def put(self, value: object) -> Call:
        return Call(lambda: value)

    def get(self, call: Call) -> Any:
        if isinstance(call.result, Exception):
            raise call.result
        return call.result

    def kill(self, actor: object) -> None: ...

    def nodes(self) -> list[dict[str, Any]]:
        return [{"NodeID": node, "Alive": True} for node in self.living]

    def get_runtime_context(self) -> SimpleNamespace:
        return SimpleNamespace(get_node_id=lambda: self._node)

    def monotonic(self) -> float:
        return time.monotonic() + self.waited

    def sleep(self, seconds: float) -> None:
        self.waited += seconds
        assert self.waited < 10_000, "it comes to nothing"


@dataclass
class Fates:
    """What becomes of workers when they start, calibrate and evaluate, in this order; what is not named goes well."""

    starting: list[Exception | None] = field(default_factory=list)
    calibrating: list[Exception | None] = field(default_factory=list)
    evaluating: list[Exception | None] = field(default_factory=list)
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
        meet(self.evaluating)
        return answer(request)


def meet(fates: list[Exception | None]) -> None:
    fate = fates.pop(0) if fates else FINE
    if fate is not None:
        raise fate


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    found = StandIn()
    for module in (ray_actor, ray_pool):
        monkeypatch.setattr(module, "ray", found)
    monkeypatch.setattr(ray_pool, "time", found)
    monkeypatch.setattr(ray_pool, "start_ray", lambda *_: None)
    return found


def pool_of(fates: Fates, **settings: Any) -> RayPool:
    workers = WorkersSection(**settings)
    return RayPool(workers, ModelConfig("nowhere"), EngineConfig(), {}, worker=fates)


def poll_until_ready(pool: RayPool, count: int) -> None:
    while pool.ready < count:
        pool.poll(0.1)


def submit(pool: RayPool, *tickets: str) -> None:
    for ticket in tickets:
        pool.submit(EvaluationRequest(IdentityEdit(), (), ticket=ticket))


def collect(pool: RayPool, count: int = 1) -> list[EvaluationReply]:
    replies = list[EvaluationReply]()
    while len(replies) < count:
        replies += pool.poll(0.1)
    return replies


def test_a_pool_ends_when_no_worker_starts(stand_in: StandIn) -> None:
    fates = Fates(starting=[FAIL] * 9)
    with pytest.raises(PoolError, match="workers can't start: RuntimeError: CUDA error"):
        collect(pool_of(fates))
    assert fates.starts == 3 and 2.9 < stand_in.waited < 4, "after one second, and after two more"
    with pytest.raises(PoolError, match=r"after 50 s .*: the model loads slowly"):
        collect(pool_of(Fates(starting=[HANG]), timeout_s=50))
    stand_in.full = True
    with pytest.raises(PoolError, match=r"after 50 s .*: the cluster has no room for num_cpus=64"):
        pool_of(Fates(), timeout_s=50, num_cpus=64).calibrate(ANYTHING, ())
    assert 100 < stand_in.waited < 106


@pytest.mark.parametrize(("address", "starts"), [(None, 1), ("auto", 3)])
def test_a_model_that_can_not_be_loaded_is_the_users_fault(address: str | None, starts: int) -> None:
    """Other nodes may have other files; this machine hasn't."""
    fates = Fates(starting=[REFUSE] * 9)
    with pytest.raises(UserError, match=r"^not a model for this$"):
        collect(pool_of(fates, address=address))
    assert fates.starts == starts


def test_a_worker_that_can_not_start_is_waited_for_beside_one_that_is_ready(caplog: pytest.LogCaptureFixture) -> None:
    """It is started again after pauses that grow, and if it hangs, and the search goes on."""
    pool = pool_of(Fates(starting=[FINE, *[FAIL] * 8, HANG]), timeout_s=100)
    poll_until_ready(pool, 1)
    pool.resize(2)
    submit(pool, *map(str, range(20)))
    assert len(collect(pool, 20)) == 20 and pool.ready == 1
    poll_until_ready(pool, 2)
    said = [record for record in caplog.records if "can't start" in record.message]
    pauses = [record.args[-2] for record in said if isinstance(record.args, tuple)]
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60, 60], "no longer than the longest"
    words = f"worker 2 of 2 can't start on {socket.gethostname()}: RuntimeError: CUDA error"
    assert all(words in record.message and "1 are ready" in record.message for record in said[:-1])
    assert "the model took longer to load than workers.timeout_s = 100" in said[-1].message


def test_who_waits_for_a_calibration_hears_what_is_asked(stand_in: StandIn) -> None:
    stand_in.full, asked = True, list[float]()

    def check() -> None:
        asked.append(stand_in.waited)
        if len(asked) == 3:
            raise StopRequested("interrupted")

    with pytest.raises(StopRequested):
        pool_of(Fates()).calibrate(ANYTHING, (), check)
    assert asked == [0, 1, 2]


def test_a_calibration_is_tried_again_when_its_worker_dies(stand_in: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to `_MAX_DEATHS`, and only then. Evaluations that are asked for beside it are answered afterwards."""
    fates = Fates(calibrating=[DIE, FINE, DIE, DIE, REFUSE, FAIL, FINE, HANG])
    monkeypatch.setattr(ray_pool, "_MAX_DEATHS", 2)
    pool = pool_of(fates, timeout_s=100)
    submit(pool, "before")
    assert pool.calibrate(ANYTHING, ()) == b"made" and fates.starts == 2
    with pytest.raises(PoolError, match="the calibration failed: it killed its worker 2 times, last: The actor died"):
        pool.calibrate(ANYTHING, ())
    with pytest.raises(UserError, match=r"^not a model for this$"):
        pool.calibrate(ANYTHING, ())
    with pytest.raises(PoolError, match="the calibration failed: RuntimeError: CUDA error"):
        pool.calibrate(ANYTHING, ())
    assert pool.calibrate(ANYTHING, ()) == b"made" and collect(pool)[0].ticket == "before"
    before = stand_in.waited
    with pytest.raises(PoolError, match=r"longer than 100 s; raise workers\.timeout_s, or .*calibration_tokens"):
        pool.calibrate(ANYTHING, ())
    assert stand_in.waited - before >= 100


def test_an_evaluation_has_so_many_attempts_and_so_much_time(
    stand_in: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_pool, "_MAX_DEATHS", 2)
    pool = pool_of(Fates(evaluating=[DIE, FAULT, FINE, HANG, FINE, HANG, HANG]), timeout_s=10)
    submit(pool, "lost", "good", "again", "late")
    lost, good, again, late = collect(pool, 4)
    assert (lost.kind, lost.attempts) == ("worker", 2)
    assert "killed its worker 2 times, last: WorkerFault: MemoryError: no more" in (lost.failure or "")
    assert (good.failure, good.attempts, again.failure, again.attempts) == (None, 1, None, 2)
    assert (late.kind, late.attempts) == ("timeout", 2) and "longer than workers.timeout_s = 10" in (late.failure or "")
    # Workers that are lost with their nodes count against nobody, for some time.
    stand_in.living = []
    pool = pool_of(Fates(evaluating=[DIE] * 15))
    submit(pool, "one", "two")
    lost, good = collect(pool, 2)
    assert "lost its worker 10 times" in (lost.failure or "") and (good.failure, good.attempts) == (None, 6)


def test_workers_that_are_too_many_end_their_evaluations() -> None:
    pool = pool_of(Fates(), count=2)
    poll_until_ready(pool, 2)
    submit(pool, *map(str, range(4)))
    pool.resize(1)
    assert pool.ready == 2, "both evaluate something"
    assert {item.attempts for item in collect(pool, 4)} == {1} and pool.ready == 1
    submit(pool, "last")
    pool.resize(0, at_once=True)
    assert pool.ready == 0 and pool.poll(0.1) == []
    pool.resize(2)
    assert [item.attempts for item in collect(pool)] == [1], "it is charged for nothing"


@dataclass
class StandInEdit:
    """As those of real edits, its arrays can't be compared with `==`."""

    phenotype_hash: str
    matrix: Any


def test_a_candidate_goes_to_the_worker_that_has_repaired_it() -> None:
    def submit_for(*candidates: str) -> None:
        for name in candidates:
            edit: Any = StandInEdit(name, np.zeros(2))
            pool.submit(EvaluationRequest(edit, (), ticket=name))

    def under_evaluation() -> list[str]:
        return ["".join(request.ticket for request in seat.requests) or "-" for seat in pool._seats]

    pool = pool_of(Fates(), count=2)
    poll_until_ready(pool, 2)
    submit_for("a", "b")
    assert under_evaluation() == ["a", "b"]
    collect(pool, 2)
    submit_for("b", "c", "d", "a", "e")
    assert under_evaluation() == ["c", "b"]
    collect(pool, 2)
    assert under_evaluation() == ["a", "d"], "whoever has repaired it first, then by order"
    collect(pool, 3)
    submit_for("c", "a")
    assert under_evaluation() == ["c", "a"], "another worker is better than none"


def test_the_effort_of_a_choice_grows_with_the_queue_and_not_with_the_free_workers() -> None:
    """Else the driver of hundreds of workers chooses, while they wait."""

    class CountedEdit:
        reads = 0

        @property
        def phenotype_hash(self) -> str:
            CountedEdit.reads += 1
            return f"{id(self)}"

    workers, queued = 40, 80
    pool = pool_of(Fates(), count=workers)
    edits: list[Any] = [CountedEdit() for _ in range(queued)]
    for place, edit in enumerate(edits):
        pool.submit(EvaluationRequest(edit, (), ticket=f"{place}"))
    while not all(seat.busy for seat in pool._seats):
        pool.poll(0.1)
    assert CountedEdit.reads < 4 * workers * queued


class LayerByLayer(Fates):
    """A worker that runs one layer at a time.

    Attributes:
        rounds: Tickets of the candidates that were evaluated together.
    """

    rounds: list[tuple[str, ...]]

    def info(self, node: str) -> WorkerInfo:
        return replace(super().info(node), by_layer=True)

    def evaluate(self, request: EvaluationRequest, splits: object) -> EvaluationReply:
        return self.evaluate_round((request,), splits)[0]

    def evaluate_round(self, requests: tuple[EvaluationRequest, ...], _: object) -> list[EvaluationReply]:
        self.rounds = [*getattr(self, "rounds", []), tuple(request.ticket for request in requests)]
        meet(self.evaluating)
        return [answer(request) for request in requests]


@pytest.mark.parametrize(("workers", "rounds"), [(1, ["0123", "45"]), (2, ["012", "345"])])
def test_candidates_share_a_worker_that_runs_one_layer_at_a_time(workers: int, rounds: list[str]) -> None:
    fates = LayerByLayer()
    pool = pool_of(fates, count=workers)
    poll_until_ready(pool, workers)
    for ticket in "012345":
        edit: Any = StandInEdit(ticket, np.zeros(2))
        pool.submit(EvaluationRequest(edit, (), ticket=ticket))
    replies = collect(pool, 6)
    assert ["".join(each) for each in fates.rounds] == rounds
    assert sorted(reply.ticket for reply in replies) == [*"012345"]


def test_other_splits_and_long_answers_are_no_part_of_a_round() -> None:
    fates = LayerByLayer()
    pool = pool_of(fates)
    poll_until_ready(pool, 1)
    kinds = {"texts": ("perplexity", 1), "short": ("generate", 4), "long": ("generate", 100)}
    splits = {
        name: PreparedSplit(name, "dev", fitness, "mean", Matching(), tokens, " ", ())
        for name, (fitness, tokens) in kinds.items()
    }
    pool.add_splits({split.fingerprint: split for split in splits.values()})
    for ticket, name in (("0", "texts"), ("1", "long"), ("2", "short"), ("3", "texts"), ("4", "long"), ("5", "short")):
        pool.submit(EvaluationRequest(IdentityEdit(), (splits[name].ref,), ticket=ticket))
    collect(pool, 6)
    assert sorted("".join(each) for each in fates.rounds) == ["03", "1", "25", "4"]


def test_candidates_that_a_worker_died_with_are_evaluated_alone() -> None:
    fates = LayerByLayer(evaluating=[DIE])
    pool = pool_of(fates)
    poll_until_ready(pool, 1)
    submit(pool, *"012")
    replies = collect(pool, 3)
    assert ["".join(each) for each in fates.rounds] == ["012", "0", "1", "2"]
    assert [(reply.ticket, reply.attempts, reply.failure) for reply in replies] == [(each, 2, None) for each in "012"]
