"""A cluster as the README has users start it: with `ray start`, which asks for a token as soon as there is one."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from ray_nodes import RAY, SETTINGS, free_port, own_nodes

from moevolve.store.repository import Store

pytestmark = pytest.mark.slow

SMALL = {"phases": [{"kind": "prune", "evaluations": 3, "initial": 3}], "final": {"rerank": 0, "test": False}}


@dataclass(frozen=True)
class Started:
    """A running cluster.

    Attributes:
        address: of its head.
        home: whose .ray/auth_token lets in.
        env: what its users have in their environment, no mode and no token.
    """

    address: str
    home: Path
    env: Mapping[str, str]


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Started]:
    """A head with two CPUs, started by the README's commands."""
    home = tmp_path_factory.mktemp("home")
    address = f"127.0.0.1:{free_port()}"
    with own_nodes(home) as nodes:
        token = nodes.env | {"RAY_AUTH_MODE": "token"}
        subprocess.run([RAY, "get-auth-token", "--generate"], env=nodes.env, check=True, capture_output=True)
        port = address.rpartition(":")[2]
        nodes.start(token, "--head", "--port", port, "--num-cpus", "2", "--include-dashboard", "false")
        yield Started(address, home, nodes.env)


def test_a_search_joins_and_its_driver_does_without_torch(
    started: Started, tiny: Any, moevolve: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    _live_in({**started.env, "RAY_AUTH_MODE": "token"}, monkeypatch)
    run = tiny.write_run(tmp_path / "run.yaml", "calm", **SMALL, workers={"count": 1, "num_cpus": 0.5})
    done = moevolve("launch", run, "--address", started.address, env={"PYTHONPROFILEIMPORTTIME": "1"})
    assert done.returncode == 0, done.stderr
    with Store.open(f"sqlite:///{tmp_path / 'moevolve.db'}") as store:
        (search,) = store.searches()
        assert (search.search.status, search.evaluated, search.failed) == ("finished", 3, 0)
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}
    assert "ray" in imported and not imported & {"torch", "transformers", "scipy"}


def test_what_ray_refuses_is_said_in_a_line_and_loses_nothing(
    started: Started, tiny: Any, moevolve: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    _live_in({**started.env, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0" * 64}, monkeypatch)
    monkeypatch.setenv("RAY_NUM_REDIS_GET_RETRIES", "1")  # Ray asks so often, once a second
    run = tiny.write_run(tmp_path / "run.yaml", "calm", **SMALL)
    done = moevolve("launch", run, "--address", started.address)
    assert done.returncode == 1
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert line.startswith(f"error: workers.address {started.address}: can't join this Ray cluster: ")
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
