"""Searches that are steered from another process or killed, and drivers that come back too late; no model is evaluated.

In the end the store holds what it would have held. And searches that no worker has room for."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sqlite3
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import ray
from disturbed_lab import local_pool
from killing import Forked, count, wait_for
from light_workers import LightWorker
from waiting import PATIENT_S, until

from moevolve.evaluators.errors import UserError
from moevolve.search.config.files import load_run_config
from moevolve.search.loop.setup import SearchSetup
from moevolve.search.pools.ray_pool import RayPool
from moevolve.search.running.execute import execute
from moevolve.search.running.launch import register, set_up_new
from moevolve.search.running.observer import Observer
from moevolve.search.running.resume import set_up_stored
from moevolve.store.repository import Store
from moevolve.workers.contract.capacity import CAPACITY, NoRoomError

pytestmark = pytest.mark.slow
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers can't import what is the tests' own

TOTAL = 24
STOPPED = 3
"""Exit code of a driver that was stopped from elsewhere."""


@pytest.fixture(scope="module")
def uninterrupted(tiny: Any, tmp_path_factory: pytest.TempPathFactory, snapshot: Any) -> Any:
    """What a store holds after the search `calm` with nothing between it and its formula."""
    folder = tmp_path_factory.mktemp("calm")
    setup = set_up_new(load_run_config(tiny.write_run(folder / "run.yaml", "calm")))
    with Store.open(f"sqlite:///{folder / 'moevolve.db'}") as store:
        register(setup, store)
        execute(setup, store, Observer(), local_pool)
    return snapshot(folder / "moevolve.db", "calm")


def put_to_sleep(driver: Forked, database: Path) -> None:
    """Stop a driver outside of its transactions, for nobody could write to a SQLite file that it holds locked."""
    deadline = time.monotonic() + PATIENT_S
    while True:
        os.kill(driver.pid, signal.SIGSTOP)
        with contextlib.closing(sqlite3.connect(database, timeout=0.1)) as connection:
            try:
                connection.execute("begin immediate")
            except sqlite3.OperationalError:
                assert time.monotonic() < deadline
                os.kill(driver.pid, signal.SIGCONT)
                time.sleep(0.05)
            else:
                connection.rollback()
                return


def test_a_driver_that_slept_past_its_lease_writes_nothing(
    uninterrupted: Any, tiny: Any, snapshot: Any, in_process: Any, tmp_path: Path
) -> None:
    database = tmp_path / "moevolve.db"
    run = tiny.write_run(tmp_path / "run.yaml", "calm")
    asleep = Forked(["launch", str(run)], tmp_path, pool="slow_pool")
    wait_for(database, 2, asleep)
    refused = in_process("resume", "calm")
    assert refused.returncode == 2 and f"calm is being run by process {asleep.pid} on" in refused.stderr
    put_to_sleep(asleep, database)
    left_at = count(database)
    assert left_at < TOTAL
    with Store.open(f"sqlite:///{database}") as store:
        control = store.control(store.search("calm").id)
        until(lambda: not store.control(store.search("calm").id).alive)
        assert control.epoch == 1
        execute(set_up_stored(store, "calm"), store, Observer(), local_pool)
        bytes_then = snapshot(database, "calm"), store.search("calm")
        os.kill(asleep.pid, signal.SIGCONT)
        output, _ = asleep.communicate(timeout=PATIENT_S)
        assert asleep.poll() == 2 and "has lost search calm" in output and "Traceback" not in output
        assert (snapshot(database, "calm"), store.search("calm")) == bytes_then
    assert snapshot(database, "calm") == uninterrupted


def test_a_killed_driver_changes_nothing(uninterrupted: Any, tiny: Any, snapshot: Any, tmp_path: Path) -> None:
    database = tmp_path / "moevolve.db"
    driver = Forked(["launch", str(tiny.write_run(tmp_path / "run.yaml", "calm"))], tmp_path, pool="slow_pool")
    wait_for(database, 4, driver)
    os.kill(driver.pid, signal.SIGKILL)
    driver.communicate(timeout=PATIENT_S)
    assert count(database) < TOTAL
    with Store.open(f"sqlite:///{database}") as store:
        execute(set_up_stored(store, "calm"), store, Observer(), local_pool)
    assert snapshot(database, "calm") == uninterrupted


def test_a_search_pauses_goes_on_scales_and_stops_as_asked(
    uninterrupted: Any, tiny: Any, snapshot: Any, in_process: Any, tmp_path: Path
) -> None:
    database = tmp_path / "moevolve.db"
    run = tiny.write_run(tmp_path / "run.yaml", "calm")
    driver = Forked(["launch", str(run)], tmp_path, pool="slow_pool")
    wait_for(database, 1, driver)

    def status() -> str:
        (search,) = json.loads(in_process("searches", "--json").stdout)
        return str(search["search"]["status"])

    asked = in_process("pause", "calm")
    assert asked.returncode == 0 and f"calm: process {driver.pid} on" in asked.stdout and "pause" in asked.stdout
    until(lambda: status() == "paused", driver)
    time.sleep(0.3)  # what had come until then is recorded
    left_at = count(database)
    time.sleep(0.5)  # longer than two evaluations take
    assert count(database) == left_at < TOTAL
    assert json.loads(in_process("scale", "calm", "2", "--json").stdout)["workers"] == 2
    assert in_process("resume", "calm").returncode == 0
    until(lambda: status() == "running", driver)
    wait_for(database, left_at + 1, driver)
    assert in_process("stop", "calm").returncode == 0
    output, _ = driver.communicate(timeout=PATIENT_S)
    assert driver.poll() == STOPPED and "moevolve resume calm" in output and "Traceback" not in output
    assert status() == "interrupted" and left_at < count(database) < TOTAL
    too_late = in_process("pause", "calm")
    assert too_late.returncode == 2 and "calm isn't being run (it is interrupted)" in too_late.stderr
    with Store.open(f"sqlite:///{database}") as store:
        execute(set_up_stored(store, "calm"), store, Observer(), local_pool)
    assert snapshot(database, "calm") == uninterrupted


def test_a_cancelled_search_is_over(tiny: Any, in_process: Any, tmp_path: Path) -> None:
    run = tiny.write_run(tmp_path / "run.yaml", "calm")
    repeated = ["launch", str(run), "--or-resume"]
    driver = Forked(repeated, tmp_path, pool="slow_pool")
    wait_for(tmp_path / "moevolve.db", 1, driver)
    assert in_process("cancel", "calm").returncode == 0
    told, _ = driver.communicate(timeout=PATIENT_S)
    assert driver.poll() == 0, "a cluster manager would begin it again"
    assert "cancelled from elsewhere, for good" in told and "moevolve resume" not in told
    again = in_process(*repeated)
    assert again.returncode == 0 and "calm was cancelled" in again.stderr
    for command in (["resume", "calm"], ["cancel", "calm"], ["scale", "calm", "3"]):
        refused = in_process(*command)
        assert refused.returncode == 2 and len(refused.stderr.strip().splitlines()) == 1, command
    assert "was cancelled" in in_process("resume", "calm").stderr


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
