"""The process that describes a search's model, and is the search's first worker on a cluster with room for one."""

from __future__ import annotations

import os
import sys
from typing import Any

import pytest
import ray
from search_lab import run_config

from moevolve.evaluators.errors import UserError
from moevolve.search.config.run import RunConfig
from moevolve.search.pools.ray_actor import FirstWorker, worker_actor


def process_of(config: RunConfig) -> int:
    return os.getpid()


@pytest.fixture
def without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a driver is that hasn't imported it."""
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])


def test_it_is_a_worker_where_there_is_room(ray_address: str, without_torch: None) -> None:
    config = run_config(workers={"num_cpus": 3, "address": ray_address})
    try:
        with FirstWorker() as first:
            pids = [first.call(process_of, config) for _ in range(2)]
            worker: Any = first.take()
            assert ray.get(worker.call.remote(process_of, config)) == pids[0] == pids[1] != os.getpid()
            # It has three of the cluster's four processors.
            other = worker_actor(config.workers).remote()
            ready, _ = ray.wait([other.place.remote()], timeout=0.5)
            assert not ready
            assert first.call(process_of, config) not in (pids[0], os.getpid())
            assert first.take() is None
            ray.kill(worker)
            ray.kill(other)
    finally:
        ray.shutdown()


def test_a_wrong_path_is_said_before_ray_starts(without_torch: None) -> None:
    config = run_config(model={"path": "/nowhere/model"})
    with FirstWorker() as first, pytest.raises(UserError, match="/nowhere/model: no such directory"):
        first.call(process_of, config)
    assert not ray.is_initialized()


def test_the_driver_does_it_where_no_cluster_answers(without_torch: None) -> None:
    """So that a search is recorded all the same."""
    with FirstWorker() as first:
        assert first.call(process_of, run_config(workers={"address": "127.0.0.1:1"})) == os.getpid()
        assert first.take() is None
