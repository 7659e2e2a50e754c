"""What crosses nodes: joining a cluster by its address, and a node that goes away under an evaluation."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster
from report_lab import finished
from waiting import PATIENT_S

from moevolve.evaluators.preparation.prepare import prepare_split
from moevolve.evaluators.preparation.registry import load_task
from moevolve.evaluators.types import PreparedSplit
from moevolve.search.config.files import load_run_config
from moevolve.search.config.run import WorkersSection
from moevolve.search.loop.setup import SearchSetup
from moevolve.search.pools import ray_pool
from moevolve.search.pools.base import PoolError
from moevolve.search.pools.ray_pool import RayPool
from moevolve.search.running.execute import execute
from moevolve.search.running.launch import register, set_up_new
from moevolve.search.running.observer import Observer
from moevolve.store.repository import Store
from moevolve.workers.contract.edits import IdentityEdit
from moevolve.workers.contract.messages import EvaluationReply, EvaluationRequest
from moevolve.workers.contract.settings import EngineConfig, ModelConfig
from moevolve.workers.worker import EvaluationWorker

pytestmark = pytest.mark.slow

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers can't import this file


@pytest.fixture
def cluster(frugal: dict[str, Any]) -> Iterator[Cluster]:
    """A head without CPUs and two nodes of one each: every worker has a node to itself."""
    ray.shutdown()
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **frugal})
    yield cluster
    ray.shutdown()
    cluster.shutdown()


def test_a_lost_node_counts_against_nobody(cluster: Cluster, tiny: Any) -> None:
    nodes = [cluster.add_node(num_cpus=1, include_log_monitor=False) for _ in range(2)]
    cluster.wait_for_nodes()
    split = prepare_split(load_task(tiny.task), "search")
    workers = WorkersSection(count=2, num_cpus=1, max_attempts=1, address=cluster.address)
    # One token per pass makes an evaluation long enough to lose a node under it.
    model, engine = ModelConfig(path=str(tiny.model), device="cpu"), EngineConfig(batch_tokens=1)
    pool = RayPool(workers, model, engine, {split.fingerprint: split})
    try:
        _wait_until_ready(pool, 2)
        for number in range(60):
            pool.submit(EvaluationRequest(IdentityEdit(), (split.ref,), ticket=str(number)))
        done = pool.poll(5.0)
        cluster.remove_node(nodes[0], allow_graceful=False)
        done += _collect(pool, 60 - len(done))
        assert sorted(int(item.ticket) for item in done) == list(range(60))
        assert [item.failure for item in done] == [None] * 60
        assert len({item.results[split.fingerprint].gold_logprob for item in done}) == 1
        assert max(item.attempts for item in done) == 2, "one evaluation was lost with its node"
    finally:
        pool.close()


def test_a_start_that_a_node_takes_along_is_no_failed_one(
    cluster: Cluster, tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_pool, "_FAILED_STARTS", 1)
    loading, gate = tmp_path / "loading", tmp_path / "gate"

    class LoadingWorker(EvaluationWorker):
        def __init__(self, *arguments: Any) -> None:
            loading.touch()
            while not gate.exists():
                time.sleep(0.05)
            super().__init__(*arguments)

    node = cluster.add_node(num_cpus=1, include_log_monitor=False)
    cluster.wait_for_nodes()
    model = ModelConfig(path=str(tiny.model), device="cpu")
    pool = RayPool(WorkersSection(address=cluster.address), model, EngineConfig(), {}, worker=LoadingWorker)
    try:
        while not loading.exists():
            pool.poll(0.5)
        cluster.remove_node(node, allow_graceful=False)
        cluster.add_node(num_cpus=1, include_log_monitor=False)
        gate.touch()
        _wait_until_ready(pool, 1)
    finally:
        pool.close()


def test_an_address_where_no_cluster_is(tiny: Any) -> None:
    ray.shutdown()
    workers = WorkersSection(address="127.0.0.1:1")
    with pytest.raises(PoolError, match=r"127\.0\.0\.1:1"):
        RayPool(workers, ModelConfig(path=str(tiny.model)), EngineConfig(), {})


def _wait_until_ready(pool: RayPool, workers: int) -> None:
    deadline = time.monotonic() + PATIENT_S
    while pool.ready < workers:
        assert time.monotonic() < deadline, "the workers do not start"
        pool.poll(0.5)


def _collect(pool: RayPool, count: int) -> list[EvaluationReply]:
    done: list[EvaluationReply] = []
    deadline = time.monotonic() + PATIENT_S
    while len(done) < count:
        assert time.monotonic() < deadline, f"{count - len(done)} evaluations are missing"
        done += pool.poll(0.5)
    return done


def waiting_at(gate: Path) -> type[EvaluationWorker]:
    """Workers that begin no evaluation before there is a file."""

    class WaitingWorker(EvaluationWorker):
        def evaluate(self, request: EvaluationRequest, splits: tuple[PreparedSplit, ...]) -> EvaluationReply:
            deadline = time.monotonic() + PATIENT_S
            while not gate.exists() and time.monotonic() < deadline:
                time.sleep(0.05)
            return super().evaluate(request, splits)

    return WaitingWorker


class WatchedPool(RayPool):
    """A pool that someone looks at after each poll."""

    watch: Callable[[RayPool], None]

    def poll(self, timeout: float) -> list[EvaluationReply]:
        replies = super().poll(timeout)
        self.watch(self)
        return replies


def test_a_search_takes_what_nodes_there_are(cluster: Cluster, tiny: Any, snapshot: Any, tmp_path: Path) -> None:
    """One node, then two, then another one: the population is the one that a single worker makes."""
    nodes = [cluster.add_node(num_cpus=1, include_log_monitor=False)]
    cluster.wait_for_nodes()
    phases, final = [{"kind": "prune", "evaluations": 12, "initial": 6}], {"rerank": 0, "test": False}
    workers = {"count": "auto", "address": cluster.address}
    run = load_run_config(tiny.write_run(tmp_path / "run.yaml", "calm", workers=workers, phases=phases, final=final))
    gate = tmp_path / "gate"

    def watch(pool: RayPool) -> None:
        if pool.ready == 1 and len(nodes) == 1:
            nodes.append(cluster.add_node(num_cpus=1, include_log_monitor=False))
        if pool.ready == 2 and not gate.exists():
            cluster.remove_node(nodes[0], allow_graceful=False)
            gate.touch()

    def make_pool(setup: SearchSetup) -> RayPool:
        config = setup.config
        pool = WatchedPool(config.workers, config.model, config.engine, setup.all_prepared, worker=waiting_at(gate))
        pool.watch = watch
        return pool

    with Store.open(f"sqlite:///{tmp_path / 'moevolve.db'}") as store:
        setup = set_up_new(run)
        register(setup, store)
        execute(setup, store, Observer(), make_pool)
    assert gate.exists(), "there was no second worker"
    with Store.open(f"sqlite:///{tmp_path / 'local.db'}") as store:
        finished(store, run)
    assert snapshot(tmp_path / "moevolve.db", "calm") == snapshot(tmp_path / "local.db", "calm")


def test_workers_that_are_too_many_end_their_evaluations(cluster: Cluster, tiny: Any, tmp_path: Path) -> None:
    cluster.add_node(num_cpus=2, include_log_monitor=False)
    cluster.wait_for_nodes()
    split, gate = prepare_split(load_task(tiny.task), "search"), tmp_path / "gate"
    workers = WorkersSection(count=2, address=cluster.address)
    model, splits = ModelConfig(path=str(tiny.model), device="cpu"), {split.fingerprint: split}
    pool = RayPool(workers, model, EngineConfig(), splits, worker=waiting_at(gate))
    try:
        _wait_until_ready(pool, 2)
        for number in range(4):
            pool.submit(EvaluationRequest(IdentityEdit(), (split.ref,), ticket=str(number)))
        pool.resize(1)
        assert pool.ready == 2, "both evaluate something"
        gate.touch()
        done = _collect(pool, 4)
        assert pool.ready == 1 and {item.attempts for item in done} == {1}
        gate.unlink()
        for number in range(2):
            pool.submit(EvaluationRequest(IdentityEdit(), (split.ref,), ticket=str(number)))
        pool.resize(0, at_once=True)
        assert pool.ready == 0 and pool.poll(0.1) == []
        gate.touch()
        pool.resize(1)
        assert {item.attempts for item in _collect(pool, 2)} == {1}, "they are charged for nothing"
    finally:
        pool.close()
