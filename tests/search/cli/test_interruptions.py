"""Searches on Ray whose driver or workers are killed or stopped: in the end the store holds what it would have held."""

from __future__ import annotations

import json
import os
import random
import signal
from pathlib import Path
from typing import Any

import pytest
from killing import Driver, Forked, count, kill_at, last_worker, start, wait_for
from local_workers import local_pool
from waiting import PATIENT_S

from moevolve.search.running.execute import execute
from moevolve.search.running.observer import Observer
from moevolve.search.running.resume import set_up_stored
from moevolve.store.repository import Store

pytestmark = pytest.mark.slow

TOTAL = 24
TWO = ["--set", "workers.count=2", "--set", "workers.num_cpus=0.5"]


@pytest.fixture
def joined(ray_address: str) -> list[str]:
    """On the tests' own cluster instead of one that has to be started."""
    return ["--address", ray_address]


def test_a_driver_killed_with_a_worker_changes_nothing(
    uninterrupted: Any, tiny: Any, snapshot: Any, joined: list[str], tmp_path: Path
) -> None:
    """The first driver has started Ray itself, which ends with it; of the second, which is sent SIGTERM as a cluster
    manager does, one of two workers is killed before; it leaves orphans on a cluster that lives on."""
    database = tmp_path / "moevolve.db"
    run = tiny.write_slow_run(tmp_path / "run.yaml", "calm")
    rng = random.Random(5)
    kill_at(Forked(["launch", str(run)], tmp_path), database, rng.randrange(1, TOTAL // 3), rng.uniform(0, 0.1))
    assert count(database) < TOTAL - 8
    driver = Forked(["resume", "calm", *joined, *TWO], tmp_path)
    wait_for(database, count(database) + 2, driver)
    os.kill(last_worker(database), signal.SIGKILL)
    check_interrupted(driver, os.kill, signal.SIGTERM, tmp_path, count(database) + 3)
    resume(tmp_path)
    assert snapshot(database, "calm") == uninterrupted


def test_ctrl_c_leaves_a_resumable_search(
    uninterrupted: Any, tiny: Any, snapshot: Any, in_process: Any, tmp_path: Path
) -> None:
    """In a terminal it reaches the whole group: the driver, and the Ray that it started."""
    run = tiny.write_slow_run(tmp_path / "run.yaml", "calm")
    check_interrupted(start(["launch", str(run)], tmp_path), os.killpg, signal.SIGINT, tmp_path, 1)
    (search,) = json.loads(in_process("searches", "--json").stdout)
    assert search["search"]["status"] == "interrupted"
    resume(tmp_path)
    assert snapshot(tmp_path / "moevolve.db", "calm") == uninterrupted


def check_interrupted(driver: Driver, stop: Any, number: int, folder: Path, goal: int) -> None:
    """Stop a driver once so many individuals are evaluated; it ends as it should."""
    wait_for(folder / "moevolve.db", goal, driver)
    stop(driver.pid, number)
    output, _ = driver.communicate(timeout=PATIENT_S)
    assert driver.poll() == 130
    assert "moevolve resume calm" in output
    assert "Traceback" not in output and "SIGTERM" not in output
    assert count(folder / "moevolve.db") < TOTAL


def resume(folder: Path) -> None:
    """To the end, by a worker in this process."""
    with Store.open(f"sqlite:///{folder / 'moevolve.db'}") as store:
        execute(set_up_stored(store, "calm"), store, Observer(), local_pool)
