"""Searches of this process that are asked for something at a certain moment."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from disturbed_lab import CheapWorker, local_pool, setup_of
from waiting import PATIENT_S

from moevolve.search.config.files import load_run_config
from moevolve.search.pools.base import StopRequested
from moevolve.search.pools.local import LocalPool
from moevolve.search.running.execute import execute
from moevolve.search.running.launch import register, set_up_new
from moevolve.search.running.observer import Observer
from moevolve.store.records import DesiredState
from moevolve.store.repository import Store


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moevolve.search.running.lease_heartbeat._BEAT_S", 0.1)


@pytest.mark.parametrize("moment", ["starting workers", "evaluating"])
def test_after_a_pause_a_search_does_what_it_did_before(moment: str, tmp_path: Path) -> None:
    url, stages, evaluated = f"sqlite:///{tmp_path / 'store.db'}", list[str](), list[int]()
    with Store.open(url) as store:

        def on_stage(stage: str) -> None:
            stages.append(stage)
            wanted: dict[str, DesiredState] = {moment: "paused", "paused": "running"}
            if stage == "paused":
                evaluated.append(sum(row.status != "pending" for row in store.history("id-lab")))
            if stages.count(stage) == 1 and stage in wanted:
                store.ask("id-lab", wanted[stage])
                time.sleep(0.5 if stage == "starting workers" else 0.0)  # workers start less fast than the driver hears

        setup = setup_of(url)
        register(setup, store)
        execute(setup, store, Observer(on_stage=on_stage), local_pool)
    assert stages == ["starting workers", "evaluating", "paused", "evaluating", "re-ranking and final scores"]
    assert moment == "evaluating" or evaluated == [0], "a pause asked during the start comes before all evaluations"


@pytest.mark.parametrize(("desired_state", "status"), [("stopped", "interrupted"), ("cancelled", "cancelled")])
def test_a_search_ends_as_asked_while_it_calibrates(
    desired_state: DesiredState, status: str, tiny: Any, tmp_path: Path
) -> None:
    phases = [{"kind": "prune", "evaluations": 4, "initial": 4, "init": ["reap", "random"]}]
    run = tiny.write_run(tmp_path / "run.yaml", "calm", phases=phases, workers={"count": 1, "lease_s": 1})
    setup = set_up_new(load_run_config(run))
    with Store.open(f"sqlite:///{tmp_path / 'store.db'}") as store:

        class Measuring(LocalPool):
            """Never ends."""

            closed = False

            def calibrate(self, recipe: object, splits: object, check: Callable[[], object] = print) -> bytes:
                store.ask(setup.search_id, desired_state)
                deadline = time.monotonic() + PATIENT_S
                while time.monotonic() < deadline:
                    check()
                    time.sleep(0.02)
                raise AssertionError("it hears nothing")

            def close(self) -> None:
                self.closed = True

        register(setup, store)
        pool, stages = Measuring(CheapWorker, {}), list[str]()
        with pytest.raises(StopRequested):
            execute(setup, store, Observer(on_stage=stages.append), lambda _: pool)
        assert store.search("calm").status == status and pool.closed
        assert stages == ["starting workers", "calibrating"]
