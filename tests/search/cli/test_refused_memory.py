"""A model that doesn't fit is refused by the workers before they load it, and the search says so."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import ray
from light_workers import LightWorker

from moevolve.evaluators.errors import UserError
from moevolve.search.config.files import load_run_config
from moevolve.search.loop.setup import SearchSetup
from moevolve.search.pools.ray_pool import RayPool
from moevolve.search.running.execute import execute
from moevolve.search.running.launch import register, set_up_new
from moevolve.search.running.observer import Observer
from moevolve.store.repository import Store
from moevolve.workers.contract.capacity import CAPACITY, NoRoomError

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])


class FullWorker(LightWorker):
    """Has no room for any model; says how much its process was told that it may take."""

    def __init__(self, *_: object) -> None:
        raise NoRoomError(f"a worker takes more than {os.environ[CAPACITY]} GB")


def full_pool(setup: SearchSetup, **_: object) -> RayPool:
    config = setup.config
    return RayPool(config.workers, config.model, config.engine, setup.all_prepared, worker=FullWorker)


def test_a_search_fails_where_no_worker_has_room(
    tiny: Any, ray_address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its worker is wanted for a calibration first."""
    monkeypatch.setenv(CAPACITY, "0.00005")
    phases = [{"kind": "prune", "evaluations": 2, "initial": 2, "init": ["naee"]}]
    workers = {"count": 1, "address": ray_address}
    setup = set_up_new(load_run_config(tiny.write_run(tmp_path / "run.yaml", "large", phases=phases, workers=workers)))
    with Store.open(f"sqlite:///{tmp_path / 'store.db'}") as store:
        register(setup, store)
        try:
            with pytest.raises(NoRoomError, match=r"^a worker takes more than 0\.00005 GB$") as refused:
                execute(setup, store, Observer(), full_pool)
        finally:
            ray.shutdown()
        assert isinstance(refused.value, UserError) and store.search("large").status == "failed"
