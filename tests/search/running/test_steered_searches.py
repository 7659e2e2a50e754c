"""Searches of this process that are asked for something at a certain moment."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from disturbed_lab import local_pool, setup_of
from light_workers import LightWorker
from waiting import PATIENT_S

from moevolve.evaluators.errors import UserError
from moevolve.search.config.files import load_run_config
from moevolve.search.pools.base import StopRequested
from moevolve.search.pools.local import LocalPool
from moevolve.search.running.execute import execute
from moevolve.search.running.launch import register, set_up_new
from moevolve.search.running.observer import Observer
from moevolve.search.running.resume import resume
from moevolve.store.errors import StoreError
from moevolve.store.records import Progress
from moevolve.store.repository import Store


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moevolve.search.running.lease_heartbeat._BEAT_S", 0.1)


def test_after_a_pause_a_search_does_what_it_did_before(tmp_path: Path) -> None:
    """One pause is asked for while the workers start, another one while they evaluate."""
    url, stages, decided = f"sqlite:///{tmp_path / 'store.db'}", list[str](), list[int]()
    with Store.open(url) as store:

        def pause() -> None:
            store.ask("id-lab", "paused")
            time.sleep(0.5)  # in which the driver hears of it

        def on_stage(stage: str) -> None:
            stages.append(stage)
            if stage == "starting workers":
                pause()
            if stage == "paused":
                decided.append(sum(row.status != "pending" for row in store.history("id-lab")))
                store.ask("id-lab", "running")

        def on_progress(progress: Progress) -> None:
            if stages.count("paused") == 1 and progress.done >= 10:
                pause()

        setup = setup_of(url)
        register(setup, store)
        execute(setup, store, Observer(on_stage=on_stage, on_progress=on_progress), local_pool)
    twice = ["evaluating", "paused"] * 2
    assert stages == ["starting workers", *twice, "evaluating", "re-ranking and final scores"]
    assert decided[0] == 0 and 10 <= decided[1] < 60, "the first one comes before all evaluations"


def test_a_paused_search_does_not_go_on_with_other_settings(tmp_path: Path) -> None:
    """They wouldn't reach the driver that has it."""
    setup = setup_of(f"sqlite:///{tmp_path / 'store.db'}")
    with Store.open(setup.config.store) as store:
        register(setup, store)
        store.acquire("id-lab", "somebody", 60)
        store.ask("id-lab", "paused")
        with pytest.raises((UserError, StoreError)):
            resume(store, "lab", Observer(), ["workers.count=2"])
        assert store.control("id-lab").desired_state == "paused"
        assert resume(store, "lab", Observer()) is None and store.control("id-lab").desired_state == "running"


def test_a_search_ends_as_asked_while_it_calibrates(tiny: Any, tmp_path: Path) -> None:
    phases = [{"kind": "prune", "evaluations": 4, "initial": 4, "init": ["reap", "random"]}]
    run = tiny.write_run(tmp_path / "run.yaml", "calm", phases=phases)
    setup = set_up_new(load_run_config(run))
    with Store.open(f"sqlite:///{tmp_path / 'store.db'}") as store:

        class Measuring(LocalPool):
            """Never ends."""

            closed = False

            def calibrate(self, measurement: object, splits: object, check: Callable[[], object] = print) -> bytes:
                store.ask(setup.search_id, "cancelled")
                deadline = time.monotonic() + PATIENT_S
                while time.monotonic() < deadline:
                    check()
                    time.sleep(0.02)
                raise AssertionError("it hears nothing")

            def close(self) -> None:
                self.closed = True

        register(setup, store)
        pool, stages = Measuring(LightWorker, {}), list[str]()
        with pytest.raises(StopRequested):
            execute(setup, store, Observer(on_stage=stages.append), lambda _: pool)
        assert store.search("calm").status == "cancelled" and pool.closed
        assert stages == ["starting workers", "calibrating"]
