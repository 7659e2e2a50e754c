"""Which Ray a search gets, after others in the same process; and the process that describes its model there."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import ray
import torch
from ray.exceptions import ActorDiedError
from search_lab import run_config

from moevolve.evaluators.errors import UserError
from moevolve.search.config.run import RunConfig, WorkersSection
from moevolve.search.pools import ray_actor
from moevolve.search.pools.base import PoolError
from moevolve.search.pools.ray_actor import ModelProbe, worker_actor
from moevolve.search.pools.ray_cluster import start_ray

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """In no Ray before and after."""
    ray.shutdown()
    yield
    ray.shutdown()


def used(**settings: object) -> str:
    """The name of a search's Ray."""
    start_ray(WorkersSection.model_validate(settings))
    return str(ray.get_runtime_context().gcs_address)


def cpus() -> float:
    return float(ray.cluster_resources()["CPU"])


def test_a_search_gets_the_ray_of_the_one_before_or_an_error(ray_address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PoolError, match=r"127\.0\.0\.1:1: no Ray cluster answers there"):
        used(address="127.0.0.1:1")
    joined = used(address=ray_address)
    assert cpus() == 4
    assert all(used(address=address) == joined for address in ("auto", ray_address, None))
    with pytest.raises(PoolError, match=r"is in the Ray at \S+ already, and can't join the one at 127\.0\.0\.1:1: "):
        used(address="127.0.0.1:1")
    ray.shutdown()
    monkeypatch.setenv("RAY_ADDRESS", ray_address)
    assert used() == joined, "as in a job of Ray's"
    monkeypatch.delenv("RAY_ADDRESS")
    ray.shutdown()
    first = used(num_cpus=0.5)
    assert first != joined and first.startswith("127.0.0.1:"), "no other machine reaches it"
    assert cpus() >= (os.cpu_count() or 1), "it may be scaled up later"
    assert ray.get(ray.remote(lambda: os.nice(0)).remote()) == os.nice(0) + 5, "a quarter of a shared core"
    enough = int(cpus())
    assert used(count=9, num_cpus=enough) == used(count="auto") == first
    for settings, said in (
        ({"num_gpus": 999}, r"num_gpus=999: Ray has \d+ GPUs"),
        ({"num_cpus": 999}, "num_cpus=999: "),
    ):
        with pytest.raises(UserError, match=rf"^workers\.{said}.*ray\.shutdown\(\)"):
            used(**settings)
    for address in (ray_address, "auto"):
        with pytest.raises(PoolError, match="can't join the one at"):
            used(address=address)
    ray.shutdown()

    def no_more(num_cpus: int, **_: object) -> None:
        raise RuntimeError(f"no Ray of {num_cpus} CPUs")

    monkeypatch.setattr(ray, "init", no_more)
    said = f"^Ray can't be started on this machine: no Ray of {2 * enough} CPUs; its files go to .*RAY_TMPDIR"
    with pytest.raises(UserError, match=said):
        used(count=2, num_cpus=enough)


def test_a_folder_that_ray_can_not_use_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path / ("long" * 30)))
    said = r"^Ray can't be started on this machine: .* cannot exceed \d+ bytes: .*which RAY_TMPDIR can name"
    with pytest.raises(UserError, match=said):
        used()


def test_a_ray_that_is_the_users_own_is_taken(ray_address: str) -> None:
    ray.init(ray_address, log_to_driver=False)
    mine = ray.get_runtime_context().gcs_address
    for settings in ({}, {"num_cpus": 64}, {"num_gpus": 999}, {"address": "auto"}, {"address": ray_address}):
        assert used(**settings) == mine
    with pytest.raises(PoolError, match=r"call ray\.shutdown\(\) first"):
        used(address="127.0.0.1:1")


def process_of(config: RunConfig) -> int:
    return os.getpid()


@pytest.fixture
def without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a driver is that hasn't imported it."""
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])


def test_a_models_describer_is_the_first_worker_where_there_is_room(ray_address: str, without_torch: None) -> None:
    config = run_config(workers={"num_cpus": 3, "address": ray_address})
    with ModelProbe() as first:
        pids = [first.call(process_of, config) for _ in range(2)]
        worker: Any = first.take()
        assert ray.get(worker.call.remote(process_of, config)) == pids[0] == pids[1] != os.getpid()
        assert first.call(process_of, config) == pids[0] and first.take() is None
        # It has three of the cluster's four processors.
        other = worker_actor(config.workers).remote()
        ready, _ = ray.wait([other.place.remote()], timeout=0.1)
        assert not ready
        ray.kill(other)
        ray.kill(worker)
        with pytest.raises(ActorDiedError):  # Ray may answer for a moment longer
            list(iter(lambda: ray.get(worker.place.remote()), None))
        assert first.call(process_of, config) not in (pids[0], os.getpid()), "its pool may have stopped it"


def test_a_wrong_path_is_said_before_ray_starts(without_torch: None) -> None:
    config = run_config(model={"path": "/nowhere/model"})
    with ModelProbe() as first, pytest.raises(UserError, match="/nowhere/model: no such directory"):
        first.call(process_of, config)
    assert not ray.is_initialized()


def test_the_driver_describes_the_model_where_no_cluster_answers(without_torch: None) -> None:
    """So that a search is recorded all the same."""
    with ModelProbe() as first:
        assert first.call(process_of, run_config(workers={"address": "127.0.0.1:1"})) == os.getpid()
        assert first.take() is None


def test_an_exported_cluster_that_is_gone_is_left_out_where_this_machine_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, without_torch: None
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    assert used(address="local").startswith("127.0.0.1:")
    ray.shutdown()
    with pytest.raises(PoolError, match=r"^RAY_ADDRESS 127.* set workers\.address to local, or unset RAY_ADDRESS$"):
        used()
    with patch.object(ray_actor, "start_ray", side_effect=start_ray) as started, ModelProbe() as first:
        assert [first.call(process_of, run_config()) for _ in range(2)] == [os.getpid()] * 2
        monkeypatch.setitem(sys.modules, "torch", torch)
        assert first.gpus(run_config()) == torch.cuda.device_count()
    assert started.call_count == 1, "each attempt may take half a minute"
    with ModelProbe() as first:
        assert first.gpus(run_config()) == torch.cuda.device_count()
