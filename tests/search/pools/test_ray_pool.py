"""The pool on a real Ray: what reaches workers, workers and nodes that go away, and a clean import path."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import sqlite3
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import disturbed_lab
import pytest
import ray
import search_lab
from disturbed_lab import CheapWorker, population, undisturbed
from light_workers import LightWorker, await_file
from ray.cluster_utils import Cluster
from ray_nodes import FRUGAL
from replies import failure
from search_lab import make_lab_setup, prepared
from waiting import until

from moevolve.evaluators.types import PreparedSplit, SplitRef
from moevolve.search.config.run import WorkersSection
from moevolve.search.loop.setup import SearchSetup
from moevolve.search.pools import ray_pool
from moevolve.search.pools.ray_pool import RayPool
from moevolve.search.running.execute import execute
from moevolve.search.running.launch import register
from moevolve.search.running.observer import Observer
from moevolve.store.repository import Store
from moevolve.workers.contract.edits import IdentityEdit
from moevolve.workers.contract.messages import EvaluationReply, EvaluationRequest, WorkerFault
from moevolve.workers.contract.settings import EngineConfig, ModelConfig

pytestmark = pytest.mark.slow

for module in (sys.modules[__name__], disturbed_lab, search_lab):
    ray.cloudpickle.register_pickle_by_value(module)  # workers can't import what is the tests' own


CHECKOUT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A head, a node like all others; it takes a second to find out that a node is gone, not the default's twenty."""
    ray.shutdown()
    watchful = {
        "health_check_initial_delay_ms": 500,
        "health_check_period_ms": 300,
        "health_check_failure_threshold": 3,
        "object_manager_pull_timeout_ms": 1000,  # after which a copy of what a lost node had is sought elsewhere
    }
    settings = FRUGAL | {"_system_config": FRUGAL["_system_config"] | watchful}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, **settings})
    yield cluster
    ray.shutdown()
    cluster.shutdown()


def add_node(cluster: Cluster) -> Any:
    """With one CPU, which a worker has to itself."""
    return cluster.add_node(wait=True, num_cpus=1, include_log_monitor=False)


def lose_node(cluster: Cluster, node_id: str) -> None:
    """Until it is known that it has gone, its worker may live on and answer."""
    left = len(cluster.worker_nodes)
    (lost,) = (node for node in cluster.worker_nodes if node.node_id == node_id)
    cluster.remove_node(lost, allow_graceful=False)
    # The head is among them.
    until(lambda: sum(node["Alive"] for node in ray.nodes()) <= left, why=lambda: "the node does not go")


def node_here() -> str:
    return str(ray.get_runtime_context().get_node_id())


class TalkingWorker(LightWorker):
    """Does what the ticket says instead of evaluating; `doomed` is at fault once the file is there."""

    def evaluate(self, request: EvaluationRequest, splits: tuple[PreparedSplit, ...]) -> EvaluationReply:
        match request.ticket.split():
            case ["kernels"]:
                return failure(request, reason=str(importlib.util.find_spec("kernels")))
            case ["split"]:
                return failure(request, reason=splits[0].task)
            case ["doomed", path]:
                await_file(Path(path))
                raise WorkerFault("MemoryError: no more")
        return super().evaluate(request, splits)


def test_deaths_and_faults_of_workers_stay_with_their_candidates(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver runs in the checkout's folder, the worst place for import paths."""
    monkeypatch.setattr(ray_pool, "_MAX_DEATHS", 2)
    workers = WorkersSection(num_cpus=0.5, address=cluster.address)
    with contextlib.chdir(CHECKOUT):
        pool = RayPool(workers, ModelConfig("nowhere"), EngineConfig(), {}, worker=TalkingWorker)

    def collect(ticket: str, *splits: SplitRef) -> EvaluationReply:
        pool.submit(EvaluationRequest(IdentityEdit(), splits, ticket=ticket))
        replies = list[EvaluationReply]()
        while not replies:
            replies = pool.poll(0.1)
        return replies[0]

    with contextlib.closing(pool):
        good = collect("good")
        assert (good.failure, good.attempts) == (None, 1)
        late = prepared("late", "search")
        pool.add_splits({late.fingerprint: late})
        split = collect("split", late.ref)
        assert (split.failure, split.kind) == ("late", "candidate")
        # Ray puts the driver's folder on its workers' path: the checkout, when a search is launched from there.
        assert str(CHECKOUT) not in (collect("kernels").failure or "")

        gate, victim = tmp_path / "gate", int(good.worker.rpartition("/")[2])
        threading.Timer(0.3, lambda: (os.kill(victim, signal.SIGKILL), gate.touch())).start()
        doomed = collect(f"doomed {gate}")
        assert (doomed.kind, doomed.attempts) == ("worker", 2)
        assert "killed its worker 2 times, last: WorkerFault: MemoryError: no more" in (doomed.failure or "")
        assert not doomed.worker.endswith(f"/{victim}") and collect("good").attempts == 1


class WatchedPool(RayPool):
    """A pool that someone looks at after each poll."""

    watch: Callable[[RayPool], None]

    def poll(self, timeout: float) -> list[EvaluationReply]:
        replies = super().poll(timeout)
        self.watch(self)
        return replies


def test_a_search_takes_what_nodes_there_are_and_lost_ones_count_against_nobody(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of three, one goes while its worker loads, another one while its worker evaluates: the population is the same as
    a single worker's, though one failed start would end the search, and one death a candidate."""
    monkeypatch.setattr(ray_pool, "_FAILED_STARTS", 1)
    monkeypatch.setattr(ray_pool, "_MAX_DEATHS", 1)
    loading, loaded, gate = (tmp_path / name for name in ("loading", "loaded", "gate"))
    loading.mkdir()
    for _ in range(2 - len(cluster.worker_nodes)):
        add_node(cluster)
    losing, lost = (node.node_id for node in cluster.worker_nodes)

    class WaitingWorker(CheapWorker):
        def __init__(self, *_: object) -> None:
            super().__init__(seconds=0.0)
            (loading / node_here()).touch()
            await_file(loaded)

        def reply(self, request: EvaluationRequest) -> EvaluationReply:
            await_file(gate)
            return super().reply(request)

    def watch(pool: RayPool) -> None:
        if not loaded.exists() and len(list(loading.iterdir())) == 3:
            lose_node(cluster, losing)
            loaded.touch()
        elif pool.ready == 2 and not gate.exists():
            lose_node(cluster, lost)
            gate.touch()

    def make_pool(setup: SearchSetup) -> RayPool:
        config = setup.config
        pool = WatchedPool(config.workers, config.model, config.engine, setup.all_prepared, worker=WaitingWorker)
        pool.watch = watch
        return pool

    calm = disturbed_lab.setup_of("nowhere")
    workers = WorkersSection(count="auto", address=cluster.address)
    setup = make_lab_setup(calm.config.model_copy(update={"workers": workers}), calm.search_id)
    url = f"sqlite:///{tmp_path / 'moevolve.db'}"
    with Store.open(url) as store:
        register(setup, store)
        execute(setup, store, Observer(), make_pool)
    assert population(url) == undisturbed(tmp_path)
    with sqlite3.connect(tmp_path / "moevolve.db") as connection:
        again = connection.execute("select attempt from evaluations where attempt > 1").fetchall()
    assert again == [(2,)], "one evaluation was lost with its node"
