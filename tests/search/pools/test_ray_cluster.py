"""What crosses nodes: joining a cluster by its address, and a node that goes away under an evaluation."""

from __future__ import annotations

import contextlib
import socket
import sys
import time
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
from search_lab import make_lab_setup
from waiting import PATIENT_S

from moevolve.search.config.run import WorkersSection
from moevolve.search.loop.setup import SearchSetup
from moevolve.search.pools import ray_pool
from moevolve.search.pools.base import PoolError
from moevolve.search.pools.ray_pool import RayPool
from moevolve.search.running.execute import execute
from moevolve.search.running.launch import register
from moevolve.search.running.observer import Observer
from moevolve.store.repository import Store
from moevolve.workers.contract.edits import IdentityEdit
from moevolve.workers.contract.messages import EvaluationReply, EvaluationRequest
from moevolve.workers.contract.settings import EngineConfig, ModelConfig

pytestmark = pytest.mark.slow

for module in (sys.modules[__name__], disturbed_lab, search_lab):
    ray.cloudpickle.register_pickle_by_value(module)  # workers can't import what is the tests' own


@pytest.fixture(scope="module")
def head(frugal: dict[str, Any]) -> Iterator[Cluster]:
    """Without CPUs; it takes a second to find out that a node is gone, not the default's twenty."""
    ray.shutdown()
    watchful = {
        "health_check_initial_delay_ms": 500,
        "health_check_period_ms": 300,
        "health_check_failure_threshold": 3,
        "object_manager_pull_timeout_ms": 1000,  # after which a copy of what a lost node had is sought elsewhere
    }
    settings = frugal | {"_system_config": frugal["_system_config"] | watchful}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **settings})
    yield cluster
    ray.shutdown()
    cluster.shutdown()


@pytest.fixture
def cluster(head: Cluster) -> Iterator[Cluster]:
    """The head, and the nodes that the test adds."""
    yield head
    for node in list(head.worker_nodes):
        head.remove_node(node)
    wait_for_nodes(1)


def wait_for_nodes(left: int) -> None:
    """Until no more nodes than these are left, the head among them."""
    deadline = time.monotonic() + PATIENT_S
    while sum(node["Alive"] for node in ray.nodes()) > left:
        assert time.monotonic() < deadline, "the nodes do not go"
        time.sleep(0.1)


def add_node(cluster: Cluster, num_cpus: int = 1) -> Any:
    """With one CPU, a worker has it to itself."""
    return cluster.add_node(wait=True, num_cpus=num_cpus, include_log_monitor=False)


def light_pool(cluster: Cluster, worker: type[LightWorker] = LightWorker, **settings: Any) -> RayPool:
    workers = WorkersSection(num_cpus=1, address=cluster.address, **settings)
    return RayPool(workers, ModelConfig(path="nowhere"), EngineConfig(), {}, worker=worker)


def submit(pool: RayPool, count: int, what: str) -> None:
    for number in range(count):
        pool.submit(EvaluationRequest(IdentityEdit(), (), ticket=f"{what} {number}"))


def test_a_lost_node_counts_against_nobody(cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One goes while a worker loads on it, another one while its worker evaluates."""
    monkeypatch.setattr(ray_pool, "_FAILED_STARTS", 1)
    loading, loaded, gate = (tmp_path / name for name in ("loading", "loaded", "gate"))

    class LoadingWorker(LightWorker):
        def __init__(self, *arguments: Any) -> None:
            loading.touch()
            await_file(loaded)

    node = add_node(cluster)
    pool = light_pool(cluster, LoadingWorker, count=1, max_attempts=1)
    with contextlib.closing(pool):
        while not loading.exists():
            pool.poll(0.1)
        cluster.remove_node(node, allow_graceful=False)
        node = add_node(cluster)
        loaded.touch()
        wait_until_ready(pool, 1)

        add_node(cluster)
        pool.resize(2)
        wait_until_ready(pool, 2)
        submit(pool, 10, f"after {gate}")
        assert pool.poll(0.1) == []  # but both workers have one now
        cluster.remove_node(node, allow_graceful=False)
        wait_for_nodes(2)  # until then the lost node's worker may live on, and answer
        gate.touch()
        done = collect(pool, 10)
    assert sorted(item.ticket for item in done) == [f"after {gate} {number}" for number in range(10)]
    assert [item.failure for item in done] == [None] * 10
    assert sorted(item.attempts for item in done) == [1] * 9 + [2], "one evaluation was lost with its node"


def test_no_worker_is_started_where_three_in_a_row_failed(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_pool, "_PAUSE_S", 0.01)

    class PickyWorker(LightWorker):
        def __init__(self, *arguments: Any) -> None:
            node = ray.get_runtime_context().get_node_id()
            with (tmp_path / "starts").open("a") as starts:
                starts.write(f"{node}\n")
            if (tmp_path / node).exists():
                raise RuntimeError("no device")

    bad, _ = (add_node(cluster) for _ in range(2))
    (tmp_path / bad.node_id).touch()
    told: list[str] = []
    workers = WorkersSection(num_cpus=1, address=cluster.address, count=2)
    pool = RayPool(workers, ModelConfig("nowhere"), EngineConfig(), {}, worker=PickyWorker, on_left_out=told.append)
    with contextlib.closing(pool):
        while not told:  # the other node has no room for a second worker
            pool.poll(0.1)
        add_node(cluster)
        wait_until_ready(pool, 2)
        starts = (tmp_path / "starts").read_text().split()
        assert (starts.count(bad.node_id), len(starts), len(set(starts))) == (3, 5, 3)
        assert told == [f"3 workers in a row failed on {socket.gethostname()}, the last by RuntimeError: no device"]


def test_an_address_where_no_cluster_is() -> None:
    ray.shutdown()
    workers = WorkersSection(address="127.0.0.1:1")
    with pytest.raises(PoolError, match=r"127\.0\.0\.1:1"):
        RayPool(workers, ModelConfig(path="nowhere"), EngineConfig(), {})


def wait_until_ready(pool: RayPool, workers: int) -> None:
    deadline = time.monotonic() + PATIENT_S
    while pool.ready < workers:
        assert time.monotonic() < deadline, "the workers do not start"
        pool.poll(0.1)


def collect(pool: RayPool, count: int) -> list[EvaluationReply]:
    done: list[EvaluationReply] = []
    deadline = time.monotonic() + PATIENT_S
    while len(done) < count:
        assert time.monotonic() < deadline, f"{count - len(done)} evaluations are missing"
        done += pool.poll(0.1)
    return done


class WatchedPool(RayPool):
    """A pool that someone looks at after each poll."""

    watch: Callable[[RayPool], None]

    def poll(self, timeout: float) -> list[EvaluationReply]:
        replies = super().poll(timeout)
        self.watch(self)
        return replies


def test_a_search_takes_what_nodes_there_are(cluster: Cluster, tmp_path: Path) -> None:
    """One node, then two, then another one: the population is the one that a single worker makes."""
    nodes, gate = [add_node(cluster)], tmp_path / "gate"

    class WaitingWorker(CheapWorker):
        def reply(self, request: EvaluationRequest) -> EvaluationReply:
            await_file(gate)
            return super().reply(request)

    def watch(pool: RayPool) -> None:
        if pool.ready == 1 and len(nodes) == 1:
            nodes.append(add_node(cluster))
        if pool.ready == 2 and not gate.exists():
            cluster.remove_node(nodes[0], allow_graceful=False)
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
    assert gate.exists(), "there was no second worker"
    assert population(url) == undisturbed(tmp_path)
