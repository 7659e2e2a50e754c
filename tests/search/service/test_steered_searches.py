"""Searches of this process that are asked for something at a certain moment."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from disturbed_lab import CheapWorker, setup_of
from waiting import PATIENT_S

from moevolve.search.config.files import load_run_config
from moevolve.search.loop.setup import SearchSetup
from moevolve.search.pools.base import Pool
from moevolve.search.pools.local import LocalPool
from moevolve.search.pools.steered import StopAsked
from moevolve.search.running.execute import execute
from moevolve.search.running.observer import Observer
from moevolve.search.service.launch import register, set_up_new
from moevolve.store.records import Wanted
from moevolve.store.repository import Store


def slow_pool(setup: SearchSetup) -> Pool:
    return LocalPool(lambda: CheapWorker(seconds=0.05), setup.all_prepared)


def test_after_a_pause_a_search_does_what_it_did_before(tmp_path: Path) -> None:
    url, stages = f"sqlite:///{tmp_path / 'store.db'}", list[str]()
    with Store.open(url) as store:

        def on_stage(stage: str) -> None:
            stages.append(stage)
            wanted: dict[str, Wanted] = {"evaluating": "paused", "paused": "running"}
            if stages.count(stage) == 1 and stage in wanted:
                store.ask("id-lab", wanted[stage])

        setup = setup_of(url)
        register(setup, store)
        execute(setup, store, Observer(on_stage=on_stage), slow_pool)
    assert stages == ["starting workers", "evaluating", "paused", "evaluating", "re-ranking and final scores"]


@pytest.mark.parametrize(("wanted", "status"), [("stopped", "interrupted"), ("cancelled", "cancelled")])
def test_a_search_ends_as_asked_while_it_calibrates(wanted: Wanted, status: str, tiny: Any, tmp_path: Path) -> None:
    genome = {"kind": "eep", "experts": 2, "groups": 2, "align": "hungarian"}
    run = tiny.write_run(tmp_path / "run.yaml", "calm", genome=genome, workers={"count": 1, "lease_s": 1})
    setup = set_up_new(load_run_config(run))
    with Store.open(f"sqlite:///{tmp_path / 'store.db'}") as store:

        def calibrate(*arguments: Any) -> bytes:
            store.ask(setup.search_id, wanted)
            deadline = time.monotonic() + PATIENT_S
            while time.monotonic() < deadline:
                arguments[-1]()
                time.sleep(0.02)
            raise AssertionError("it hears nothing")

        register(setup, store)
        with pytest.raises(StopAsked):
            execute(setup, store, Observer(), calibrate=calibrate)
        assert store.search("calm").status == status
