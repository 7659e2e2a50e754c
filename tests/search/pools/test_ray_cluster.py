"""What crosses nodes: joining a cluster by its address, and a node that goes away under an evaluation."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster

from moevolve.evaluators.tasks.prepare import prepare_split
from moevolve.evaluators.tasks.registry import load_task
from moevolve.search.config.run import WorkersSection
from moevolve.search.pools.base import PoolError
from moevolve.search.pools.ray_pool import RayPool
from moevolve.workers.config import EngineConfig, ModelConfig
from moevolve.workers.messages import EvaluationReply, EvaluationRequest
from moevolve.workers.methods.base import IdentityEdit

pytestmark = pytest.mark.slow


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


def test_an_address_where_no_cluster_is(tiny: Any) -> None:
    ray.shutdown()
    workers = WorkersSection(address="127.0.0.1:1")
    with pytest.raises(PoolError, match=r"127\.0\.0\.1:1"):
        RayPool(workers, ModelConfig(path=str(tiny.model)), EngineConfig(), {})


def _wait_until_ready(pool: RayPool, workers: int) -> None:
    deadline = time.monotonic() + 400
    while pool.ready < workers:
        assert time.monotonic() < deadline, "the workers do not start"
        pool.poll(0.5)


def _collect(pool: RayPool, count: int) -> list[EvaluationReply]:
    done: list[EvaluationReply] = []
    deadline = time.monotonic() + 400
    while len(done) < count:
        assert time.monotonic() < deadline, f"{count - len(done)} evaluations are missing"
        done += pool.poll(0.5)
    return done
