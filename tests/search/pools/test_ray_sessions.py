"""Which Ray a search gets, after others in the same process; and the process that describes its model there."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import ray
from search_lab import run_config

from moevolve.evaluators.errors import UserError
from moevolve.search.config.run import RunConfig, WorkersSection
from moevolve.search.pools.base import PoolError
from moevolve.search.pools.ray_actor import FirstWorker, worker_actor
from moevolve.search.pools.ray_cluster import cluster_name, start_ray

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """In no Ray before and after."""
    ray.shutdown()
    yield
    ray.shutdown()


def started(address: str | None = None, **settings: object) -> str | None:
    """The name of the session that a search with these settings gets."""
    start_ray(WorkersSection.model_validate({"address": address, **settings}))
    return cluster_name()


def test_a_process_is_in_one_ray_at_a_time(ray_address: str) -> None:
    with pytest.raises(PoolError, match=r"127\.0\.0\.1:1: no Ray cluster answers there"):
        started("127.0.0.1:1")
    joined = started(ray_address)
    assert ray.cluster_resources()["CPU"] == 4
    assert [started(address) for address in ("auto", ray_address, None)] == [joined] * 3
    ray.shutdown()
    local = started(num_cpus=0.5)
    assert local not in (None, joined)
    assert ray.cluster_resources()["CPU"] >= (os.cpu_count() or 1), "it may be scaled up later"
    assert started(count=2, num_cpus=64) == local
    for address in (ray_address, "auto"):
        with pytest.raises(PoolError, match=r"is in the Ray at \S+ already, .* call ray\.shutdown\(\) first"):
            started(address)
    assert cluster_name() == local


def test_a_ray_that_cannot_be_started_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_more(num_cpus: int, **_: object) -> None:
        raise RuntimeError(f"no Ray of {num_cpus} CPUs")

    monkeypatch.setattr(ray, "init", no_more)
    with pytest.raises(PoolError, match="no Ray of 128 CPUs"):
        started(count=2, num_cpus=64)


def test_a_ray_that_is_the_users_own_is_taken(ray_address: str) -> None:
    ray.init(ray_address, log_to_driver=False)
    mine = cluster_name()
    assert [started(address) for address in (None, "auto", ray_address)] == [mine] * 3
    with pytest.raises(PoolError, match=r"call ray\.shutdown\(\) first"):
        started("127.0.0.1:1")
    assert cluster_name() == mine


def process_of(config: RunConfig) -> int:
    return os.getpid()


@pytest.fixture
def without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a driver is that hasn't imported it."""
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])


def test_a_models_describer_is_the_first_worker_where_there_is_room(ray_address: str, without_torch: None) -> None:
    config = run_config(workers={"num_cpus": 3, "address": ray_address})
    with FirstWorker() as first:
        pids = [first.call(process_of, config) for _ in range(2)]
        worker: Any = first.take()
        assert ray.get(worker.call.remote(process_of, config)) == pids[0] == pids[1] != os.getpid()
        # It has three of the cluster's four processors.
        assert first.call(process_of, config) not in (pids[0], os.getpid())
        assert first.take() is None
        other = worker_actor(config.workers).remote()
        ready, _ = ray.wait([other.place.remote()], timeout=0.1)
        assert not ready
        ray.kill(worker)
        ray.kill(other)


def test_a_wrong_path_is_said_before_ray_starts(without_torch: None) -> None:
    config = run_config(model={"path": "/nowhere/model"})
    with FirstWorker() as first, pytest.raises(UserError, match="/nowhere/model: no such directory"):
        first.call(process_of, config)
    assert not ray.is_initialized()


def test_the_driver_describes_the_model_where_no_cluster_answers(without_torch: None) -> None:
    """So that a search is recorded all the same."""
    with FirstWorker() as first:
        assert first.call(process_of, run_config(workers={"address": "127.0.0.1:1"})) == os.getpid()
        assert first.take() is None
