"""A cluster of two nodes as the README has users start it, with `ray start`, which asks for a token as soon as there is
one: a launch as a job on it, and a driver that it refuses."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from killing import MOEVOLVE, Forked
from ray_nodes import RAY, free_ports, own_nodes
from waiting import PATIENT_S

pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Cluster:
    """A running cluster.

    Attributes:
        address: Of its head.
        url: Of its dashboard.
        env: What its users have in their environment, no mode and no token.
        token: What they set to be let in; the token is in their home, too.
    """

    address: str
    url: str
    env: Mapping[str, str]
    token: Mapping[str, str]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A head and another node with a CPU each; the token is where `ray get-auth-token --generate` writes it."""
    home = tmp_path_factory.mktemp("home")
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    (home / ".ray").mkdir()
    (home / ".ray" / "auth_token").write_text(token["RAY_AUTH_TOKEN"])
    port, dashboard, *agents = free_ports(4)
    with own_nodes(home) as nodes:
        env = nodes.env | {"RAY_AUTH_MODE": "token", "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
        agent = [("--dashboard-agent-listen-port", str(each), "--num-cpus", "1") for each in agents]
        nodes.start(env, "--head", "--port", str(port), *agent[0], "--dashboard-port", str(dashboard))
        nodes.start(env, "--address", f"127.0.0.1:{port}", *agent[1])
        yield Cluster(f"127.0.0.1:{port}", f"http://127.0.0.1:{dashboard}", nodes.env, token)


def test_a_launch_as_a_job_has_workers_on_both_nodes(
    cluster: Cluster, uninterrupted: Any, tiny: Any, snapshot: Any, tmp_path: Path
) -> None:
    run = tiny.write_run(tmp_path / "run.yaml", "calm", workers={"count": 2, "num_cpus": 1})
    database = tmp_path / "moevolve.db"

    def ray(*command: str | Path) -> str:
        done = subprocess.run(
            [RAY, *command],
            env={**cluster.env, **cluster.token},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=PATIENT_S,
            check=False,
        )
        assert done.returncode == 0, done.stdout
        return done.stdout

    launch = (MOEVOLVE, "launch", run, "--store", f"sqlite:///{database}")
    said = ray("job", "submit", "--address", cluster.url, "--", *launch)
    assert "moevolve export calm:" in said, said
    assert snapshot(database, "calm") == uninterrupted
    actors = json.loads(ray("list", "actors", "--address", cluster.url, "--format", "json", "--detail"))
    assert len({actor["node_id"] for actor in actors if actor["class_name"] == "EvaluationWorker"}) == 2, actors


def test_what_ray_refuses_is_said_in_a_line_and_stores_nothing(cluster: Cluster, tiny: Any, tmp_path: Path) -> None:
    run = tiny.write_run(tmp_path / "run.yaml", "calm")
    # For so many seconds Ray tries.
    refused = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0" * 64, "RAY_gcs_server_port_wait_time_s": "1"}
    env = {**cluster.env, **refused, "RAY_ADDRESS": cluster.address}
    driver = Forked(["launch", str(run)], tmp_path, env=env)
    output, _ = driver.communicate(timeout=PATIENT_S)
    assert driver.poll() == 2
    (line,) = [line for line in output.splitlines() if line.startswith("error:")]
    assert line.startswith(f"error: RAY_ADDRESS {cluster.address}: can't join this Ray cluster: ")
    assert "RAY_AUTH_MODE=token" in line
    assert "Traceback" not in output
    assert not (tmp_path / "moevolve.db").exists(), "the search's name is free"
