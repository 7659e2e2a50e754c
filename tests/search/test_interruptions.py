"""Searches on Ray whose driver or workers are killed or stopped: in the end the store holds what it would have held."""

from __future__ import annotations

import json
import os
import random
import signal
from pathlib import Path
from typing import Any

import pytest
from killing import Forked, count, kill_at, last_worker, start, wait_for
from report_lab import finished

from moevolve.search.config_files import load_run_config
from moevolve.store.repository import Store

pytestmark = pytest.mark.slow

TOTAL = 24
TWO = ["--set", "workers.count=2", "--set", "workers.num_cpus=0.5"]


@pytest.fixture(scope="module")
def uninterrupted(tiny: Any, tmp_path_factory: pytest.TempPathFactory, snapshot: Any) -> Any:
    """What a store holds after the search `calm` in this process, with nothing between it and its one worker."""
    folder = tmp_path_factory.mktemp("calm")
    run = load_run_config(tiny.write_run(folder / "run.yaml", "calm"))
    with Store.open(f"sqlite:///{folder / 'moevolve.db'}") as store:
        finished(store, run)
    return snapshot(folder / "moevolve.db", "calm")


@pytest.fixture
def joined(ray_address: str) -> list[str]:
    """On the tests' own cluster instead of one that has to be started."""
    return ["--address", ray_address]


def test_sigkill_at_random_moments_changes_nothing(
    uninterrupted: Any, tiny: Any, snapshot: Any, joined: list[str], tmp_path: Path
) -> None:
    """Three kills, each after a random number of further evaluations, then a resume to the end.

    The first driver has started Ray itself, which ends with it. The others leave orphans on a cluster that lives on.
    """
    database = tmp_path / "moevolve.db"
    run = tiny.write_run(tmp_path / "run.yaml", "calm")
    rng = random.Random(5)
    for attempt, goal in enumerate(sorted(rng.sample(range(1, TOTAL - 6), 3))):
        driver = Forked(["resume", "calm", *joined] if attempt else ["launch", str(run)], tmp_path)
        kill_at(driver, database, goal, rng.uniform(0, 0.1))
        assert count(database) < TOTAL
    driver = Forked(["resume", "calm", *joined, *TWO], tmp_path)
    output, _ = driver.communicate(timeout=400)
    assert driver.poll() == 0, output
    assert snapshot(database, "calm") == uninterrupted


def test_workers_killed_during_evaluation_change_nothing(
    uninterrupted: Any, tiny: Any, snapshot: Any, joined: list[str], tmp_path: Path
) -> None:
    database = tmp_path / "moevolve.db"
    run = tiny.write_run(tmp_path / "run.yaml", "calm")
    driver = Forked(["launch", str(run), *joined, *TWO], tmp_path)
    killed = set()
    for goal in (5, 10, 15):
        wait_for(database, goal, driver)
        victim = last_worker(database)
        os.kill(victim, signal.SIGKILL)
        killed.add(victim)
    output, _ = driver.communicate(timeout=400)
    assert driver.poll() == 0, output
    assert len(killed) == 3
    assert snapshot(database, "calm") == uninterrupted


@pytest.mark.parametrize(
    ("stop", "number"),
    # Ctrl-C in a terminal reaches the whole group, a cluster manager's SIGTERM the driver alone.
    [pytest.param(os.killpg, signal.SIGINT, id="ctrl-c"), pytest.param(os.kill, signal.SIGTERM, id="sigterm")],
)
def test_an_interruption_leaves_a_resumable_search(
    stop: Any,
    number: int,
    uninterrupted: Any,
    tiny: Any,
    snapshot: Any,
    in_process: Any,
    joined: list[str],
    tmp_path: Path,
) -> None:
    database = tmp_path / "moevolve.db"
    run = tiny.write_run(tmp_path / "run.yaml", "calm")
    process = start(["launch", str(run)], tmp_path)
    wait_for(database, 1, process)
    stop(process.pid, number)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 130
    assert "moevolve resume calm" in output
    assert "Traceback" not in output and "SIGTERM" not in output
    (search,) = json.loads(in_process("searches", "--json").stdout)
    assert search["status"] == "interrupted"
    driver = Forked(["resume", "calm", *joined], tmp_path)
    output, _ = driver.communicate(timeout=400)
    assert driver.poll() == 0, output
    assert snapshot(database, "calm") == uninterrupted
