"""A cluster as the README has users start it, with `ray start`, which asks for a token as soon as there is one.

Searches join it, and are sent to it from another machine; all of it is on this one, without moevolve's folders on the
head's path."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from killing import count
from ray._raylet import AuthenticationTokenLoader  # type: ignore[attr-defined]
from ray.job_submission import JobSubmissionClient
from ray_nodes import RAY, SETTINGS, free_ports, own_nodes
from waiting import PATIENT_S

import moevolve
from moevolve.store.repository import Store

pytestmark = pytest.mark.slow

SMALL = {"phases": [{"kind": "prune", "evaluations": 3, "initial": 3}], "final": {"rerank": 0, "test": False}}


@dataclass(frozen=True)
class Cluster:
    """A running cluster.

    Attributes:
        address: Of its head.
        url: Of its dashboard.
        token: That lets in; it is in the users' home, too.
        env: What its users have in their environment, no mode and no token.
    """

    address: str
    url: str
    token: str
    env: Mapping[str, str]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A head with two CPUs, started by the README's commands."""
    home = tmp_path_factory.mktemp("home")
    port, dashboard, agent = free_ports(3)
    with own_nodes(home) as nodes:
        subprocess.run([RAY, "get-auth-token", "--generate"], env=nodes.env, check=True, capture_output=True)
        # A file that the head finds in place of the one that was sent would be taken from here.
        env = {name: value for name, value in nodes.env.items() if name != "PYTHONPATH"}
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        env |= {"RAY_AUTH_MODE": "token", "PATH": path, "MOEVOLVE_STORE": "sqlite:////no/store"}
        ports = ("--port", str(port), "--dashboard-agent-listen-port", str(agent))
        nodes.start(env, "--head", *ports, "--num-cpus", "2", "--dashboard-port", str(dashboard))
        token = (home / ".ray" / "auth_token").read_text().strip()
        yield Cluster(f"127.0.0.1:{port}", f"http://127.0.0.1:{dashboard}", token, nodes.env)


@pytest.fixture
def url(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """URL of its dashboard; the token is in the environment."""
    monkeypatch.setenv("RAY_AUTH_TOKEN", cluster.token)
    AuthenticationTokenLoader.instance().reset_cache()
    yield cluster.url
    AuthenticationTokenLoader.instance().reset_cache()


def test_a_search_is_sent_stopped_by_ray_and_sent_again(
    cluster: Cluster, url: str, uninterrupted: Any, tiny: Any, snapshot: Any, in_process: Any, tmp_path: Path
) -> None:
    """Two requests at once send it once; its folder is gone before its driver reads it."""
    run, database = tiny.write_slow_run(tmp_path / "run.yaml", "calm"), tmp_path / "moevolve.db"
    store = f"sqlite:///{database}"
    with ThreadPoolExecutor(2) as pool:
        both = list(pool.map(lambda _: moevolve.submit(run, url, store=store), range(2)))
    assert sorted(one.new for one in both) == [False, True] and both[0].id == both[1].id == both[0].job
    client = JobSubmissionClient(url, headers={"Authorization": f"Bearer {cluster.token}"})
    described = str(client.get_job_info(both[0].id))
    assert database.name not in described and str(tiny.folder) not in described

    deadline = time.monotonic() + PATIENT_S
    while count(database) < 2:
        assert client.get_job_status(both[0].id) in ("PENDING", "RUNNING"), client.get_job_logs(both[0].id)
        assert time.monotonic() < deadline
        time.sleep(0.2)
    client.stop_job(both[0].id)
    again = in_process("launch", run, "--submit", url, "--set", "window=5")
    assert again.returncode == 2 and "calm is in sqlite:///" in again.stderr, again.stderr
    with Store.open(store) as opened:
        while opened.search("calm").status != "interrupted":
            assert time.monotonic() < deadline, client.get_job_logs(both[0].id)
            time.sleep(0.1)
    assert count(database) < 24, "it was stopped on its way"
    while client.get_job_status(both[0].id) != "STOPPED":
        assert time.monotonic() < deadline
        time.sleep(0.1)
    again = in_process("launch", run, "--submit", url)
    assert again.returncode == 0 and f"as job {both[0].id}-2" in again.stdout, again.stderr
    followed = in_process("logs", "calm", "--cluster", url, "--follow")
    assert followed.returncode == 0 and re.search(r"best found .*", followed.stdout), followed.stdout
    assert snapshot(database, "calm") == uninterrupted
    again = in_process("launch", run, "--submit", url)
    assert again.returncode == 0 and "is in the store already: finished" in again.stdout
    unknown = in_process("logs", "another", "--cluster", url)
    assert unknown.returncode == 2 and "knows no job of search another" in unknown.stderr


def test_a_search_joins_and_its_driver_does_without_torch(
    cluster: Cluster, tiny: Any, moevolve: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    _live_in({**cluster.env, "RAY_AUTH_MODE": "token"}, monkeypatch)
    run = tiny.write_run(tmp_path / "run.yaml", "calm", **SMALL, workers={"count": 1, "num_cpus": 0.5})
    done = moevolve("launch", run, "--address", cluster.address, env={"PYTHONPROFILEIMPORTTIME": "1"})
    assert done.returncode == 0, done.stderr
    with Store.open(f"sqlite:///{tmp_path / 'moevolve.db'}") as store:
        (search,) = store.searches()
        assert (search.search.status, search.evaluated, search.failed) == ("finished", 3, 0)
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}
    assert "ray" in imported and not imported & {"torch", "transformers", "scipy"}


def test_what_ray_refuses_is_said_in_a_line_and_loses_nothing(
    cluster: Cluster, tiny: Any, moevolve: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    _live_in({**cluster.env, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0" * 64}, monkeypatch)
    monkeypatch.setenv("RAY_NUM_REDIS_GET_RETRIES", "1")  # Ray asks so often, once a second
    run = tiny.write_run(tmp_path / "run.yaml", "calm", **SMALL)
    done = moevolve("launch", run, "--address", cluster.address)
    assert done.returncode == 1
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert line.startswith(f"error: workers.address {cluster.address}: can't join this Ray cluster: ")
    assert "RAY_AUTH_MODE=token" in line and "moevolve resume calm" in line
    assert "Traceback" not in done.stderr
    with Store.open(f"sqlite:///{tmp_path / 'moevolve.db'}") as store:
        (search,) = store.searches()
    assert search.search.name == "calm" and "can't join" in str(search.search.status_reason)


def _live_in(env: Mapping[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Take over what Ray reads of an environment."""
    for key in SETTINGS:
        monkeypatch.delenv(key, raising=False)
    for key in (*SETTINGS, "HOME", "RAY_TMPDIR"):
        if key in env:
            monkeypatch.setenv(key, env[key])
