"""A cluster as the README has users start it, with `ray start`, which asks for a token as soon as there is one.

Searches are sent to it from another machine, and join it; all of it is on this one, without moevolve's folders on the
head's path."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from killing import Forked, count
from ray._raylet import AuthenticationTokenLoader  # type: ignore[attr-defined]
from ray.job_submission import JobSubmissionClient
from ray_nodes import free_ports, own_nodes
from waiting import PATIENT_S, until

import moevolve
from moevolve.store.repository import Store

pytestmark = pytest.mark.slow


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
    """A head with two CPUs; the token is where `ray get-auth-token --generate` writes it."""
    home = tmp_path_factory.mktemp("home")
    token = secrets.token_hex(32)
    (home / ".ray").mkdir()
    (home / ".ray" / "auth_token").write_text(token)
    port, dashboard, agent = free_ports(3)
    with own_nodes(home) as nodes:
        # A file that the head finds in place of the one that was sent would be taken from here.
        env = {name: value for name, value in nodes.env.items() if name != "PYTHONPATH"}
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        env |= {"RAY_AUTH_MODE": "token", "PATH": path, "MOEVOLVE_STORE": "sqlite:////no/store"}
        ports = ("--port", str(port), "--dashboard-agent-listen-port", str(agent))
        nodes.start(env, "--head", *ports, "--num-cpus", "2", "--dashboard-port", str(dashboard))
        yield Cluster(f"127.0.0.1:{port}", f"http://127.0.0.1:{dashboard}", token, nodes.env)


@pytest.fixture
def url(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """URL of its dashboard; the token is in the environment."""
    monkeypatch.setenv("RAY_AUTH_TOKEN", cluster.token)
    AuthenticationTokenLoader.instance().reset_cache()
    yield cluster.url
    AuthenticationTokenLoader.instance().reset_cache()


def test_a_search_is_sent_and_stopped_by_ray_and_goes_on_here(
    cluster: Cluster,
    url: str,
    uninterrupted: Any,
    tiny: Any,
    snapshot: Any,
    in_process: Any,
    worker_here: None,
    tmp_path: Path,
) -> None:
    """Two requests at once send it once; its folder is gone before its driver reads it."""
    run, database = tiny.write_slow_run(tmp_path / "run.yaml", "calm"), tmp_path / "moevolve.db"
    store = f"sqlite:///{database}"
    with ThreadPoolExecutor(2) as pool:
        both = list(pool.map(lambda _: moevolve.submit(run, url, store=store), range(2)))
    assert sorted(one.new for one in both) == [False, True] and both[0].id == both[1].id == both[0].job
    job = both[0].id
    client = JobSubmissionClient(url, headers={"Authorization": f"Bearer {cluster.token}"})
    described = str(client.get_job_info(job))
    assert database.name not in described and str(tiny.folder) not in described

    def logs() -> str:
        return client.get_job_logs(job)

    until(lambda: count(database) > 0 or client.get_job_status(job) not in ("PENDING", "RUNNING"), why=logs)
    client.stop_job(job)
    with Store.open(store) as opened:
        until(lambda: opened.search("calm").status != "running", why=logs)
        assert opened.search("calm").status == "interrupted", client.get_job_logs(job)
    until(lambda: client.get_job_status(job) == "STOPPED", why=logs)
    assert 0 < count(database) < 24, "it was stopped on its way"
    followed = in_process("logs", "calm", "--cluster", url, "--follow")
    assert "moevolve resume calm" in followed.stdout and "Traceback" not in followed.stdout
    changed = in_process("launch", run, "--submit", url, "--set", "window=5")
    assert changed.returncode == 2 and "calm is in sqlite:///" in changed.stderr, changed.stderr
    assert in_process("resume", "calm").returncode == 0
    assert snapshot(database, "calm") == uninterrupted
    again = in_process("launch", run, "--submit", url)
    assert again.returncode == 0 and "is in the store already: finished" in again.stdout
    assert f"its results go to {store}" in again.stdout
    unknown = in_process("logs", "another", "--cluster", url)
    assert unknown.returncode == 2 and "knows no job of search another" in unknown.stderr


def test_what_ray_refuses_is_said_in_a_line_and_stores_nothing(cluster: Cluster, tiny: Any, tmp_path: Path) -> None:
    run = tiny.write_run(tmp_path / "run.yaml", "calm")
    # For so many seconds Ray tries.
    refused = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0" * 64, "RAY_gcs_server_port_wait_time_s": "1"}
    driver = Forked(["launch", str(run), "--address", cluster.address], tmp_path, env={**cluster.env, **refused})
    output, _ = driver.communicate(timeout=PATIENT_S)
    assert driver.poll() == 2
    (line,) = [line for line in output.splitlines() if line.startswith("error:")]
    assert line.startswith(f"error: workers.address {cluster.address}: can't join this Ray cluster: ")
    assert "RAY_AUTH_MODE=token" in line
    assert "Traceback" not in output
    assert not (tmp_path / "moevolve.db").exists(), "the search's name is free"
