"""A search on a cluster's head, sent there from another machine; all of it is on this one, without moevolve's folders
on the head's path."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from killing import count
from ray._raylet import AuthenticationTokenLoader  # type: ignore[attr-defined]
from ray.job_submission import JobSubmissionClient
from ray_nodes import free_port, own_nodes
from waiting import PATIENT_S

import moevolve
from moevolve.store.repository import Store

pytestmark = pytest.mark.slow

TOKEN = "0123456789abcdef" * 4


@pytest.fixture
def cluster(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """URL of a head that asks for a token, which is in the environment."""
    monkeypatch.setenv("RAY_AUTH_TOKEN", TOKEN)
    AuthenticationTokenLoader.instance().reset_cache()
    with own_nodes(tmp_path_factory.mktemp("home")) as nodes:
        # A file that the head finds in place of the one that was sent would be taken from here.
        env = {name: value for name, value in nodes.env.items() if name != "PYTHONPATH"}
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        dashboard, ports = free_port(), ("--port", str(free_port()), "--dashboard-agent-listen-port", str(free_port()))
        env |= {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": TOKEN,
            "PATH": path,
            "MOEVOLVE_STORE": "sqlite:////no/store",
        }
        nodes.start(env, "--head", *ports, "--num-cpus", "2", "--dashboard-port", str(dashboard))
        yield f"http://127.0.0.1:{dashboard}"
    AuthenticationTokenLoader.instance().reset_cache()


def test_a_search_is_sent_stopped_by_ray_and_sent_again(
    cluster: str, uninterrupted: Any, tiny: Any, snapshot: Any, in_process: Any, tmp_path: Path
) -> None:
    """Two requests at once send it once; its folder is gone before its driver reads it."""
    run, database = tiny.write_slow_run(tmp_path / "run.yaml", "calm"), tmp_path / "moevolve.db"
    store = f"sqlite:///{database}"
    with ThreadPoolExecutor(2) as pool:
        both = list(pool.map(lambda _: moevolve.submit(run, cluster, store=store), range(2)))
    assert sorted(one.new for one in both) == [False, True] and both[0].id == both[1].id == both[0].job
    client = JobSubmissionClient(cluster, headers={"Authorization": f"Bearer {TOKEN}"})
    described = str(client.get_job_info(both[0].id))
    assert database.name not in described and str(tiny.folder) not in described

    deadline = time.monotonic() + PATIENT_S
    while count(database) < 2:
        assert client.get_job_status(both[0].id) in ("PENDING", "RUNNING"), client.get_job_logs(both[0].id)
        assert time.monotonic() < deadline
        time.sleep(0.2)
    client.stop_job(both[0].id)
    again = in_process("launch", run, "--submit", cluster, "--set", "window=5")
    assert again.returncode == 2 and "calm is in sqlite:///" in again.stderr, again.stderr
    with Store.open(store) as opened:
        while opened.search("calm").status != "interrupted":
            assert time.monotonic() < deadline, client.get_job_logs(both[0].id)
            time.sleep(0.1)
    assert count(database) < 24, "it was stopped on its way"
    while client.get_job_status(both[0].id) != "STOPPED":
        assert time.monotonic() < deadline
        time.sleep(0.1)
    again = in_process("launch", run, "--submit", cluster)
    assert again.returncode == 0 and f"as job {both[0].id}-2" in again.stdout, again.stderr
    followed = in_process("logs", "calm", "--cluster", cluster, "--follow")
    assert followed.returncode == 0 and re.search(r"best found .*", followed.stdout), followed.stdout
    assert snapshot(database, "calm") == uninterrupted
    again = in_process("launch", run, "--submit", cluster)
    assert again.returncode == 0 and "is in the store already: finished" in again.stdout
    unknown = in_process("logs", "another", "--cluster", cluster)
    assert unknown.returncode == 2 and "knows no job of search another" in unknown.stderr
