"""A cluster as the README has users start it: with `ray start`, which asks for a token as soon as there is one."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from ray_nodes import RAY, SETTINGS, free_port, own_nodes
from report_lab import finished

from moevolve.search.config.files import load_run_config
from moevolve.search.pools.base import PoolError
from moevolve.search.pools.ray_cluster import find_cluster
from moevolve.store.repository import Store

pytestmark = pytest.mark.slow


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
    """A head with one CPU and a node with two, started by the README's commands."""
    home = tmp_path_factory.mktemp("home")
    address = f"127.0.0.1:{free_port()}"
    with own_nodes(home) as nodes:
        token = nodes.env | {"RAY_AUTH_MODE": "token"}
        subprocess.run([RAY, "get-auth-token", "--generate"], env=nodes.env, check=True, capture_output=True)
        port = address.rpartition(":")[2]
        nodes.start(token, "--head", "--port", port, "--num-cpus", "1", "--include-dashboard", "false")
        nodes.start(token, "--address", address, "--num-cpus", "2")
        yield Started(address, home, nodes.env)


def test_a_search_over_two_nodes_is_the_local_one(
    started: Started, tiny: Any, moevolve: Any, snapshot: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The worker needs two CPUs, which the second node alone has."""
    _live_in(started.env, monkeypatch)
    run = tiny.write_run(tmp_path / "run.yaml", "calm", workers={"count": 1, "num_cpus": 2})
    done = moevolve("launch", run, "--address", started.address)
    assert done.returncode == 0, done.stderr
    with Store.open(f"sqlite:///{tmp_path / 'local.db'}") as store:
        finished(store, load_run_config(run))
    assert snapshot(tmp_path / "moevolve.db", "calm") == snapshot(tmp_path / "local.db", "calm")


def test_a_wrong_token_is_said_in_a_line_and_loses_nothing(
    started: Started, tiny: Any, moevolve: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    _live_in({**started.env, "RAY_AUTH_TOKEN": "0" * 64}, monkeypatch)
    run = tiny.write_run(tmp_path / "run.yaml", "calm")
    done = moevolve("launch", run, "--address", started.address)
    assert done.returncode == 1
    (line,) = [line for line in done.stderr.splitlines() if "error" in line.lower()]
    assert line.startswith(
        f"error: workers.address {started.address}: this cluster refuses the token in RAY_AUTH_TOKEN"
    )
    assert "moevolve resume calm" in line
    assert "Traceback" not in done.stderr and "gcs_client" not in done.stderr
    with Store.open(f"sqlite:///{tmp_path / 'moevolve.db'}") as store:
        (search,) = store.searches()
    assert search.search.name == "calm" and "refuses the token" in str(search.search.status_reason)


TOKEN = "this cluster asks for a token, "
REFUSED: dict[str, tuple[dict[str, str], str]] = {
    "no token": ({"HOME": "/nowhere"}, TOKEN + "and there is no token here"),
    "no token file": ({"RAY_AUTH_TOKEN_PATH": "/no/file"}, "no readable token in RAY_AUTH_TOKEN_PATH=/no/file"),
    "wrong token": ({"RAY_AUTH_TOKEN": "0" * 64}, "refuses the token in RAY_AUTH_TOKEN"),
    "wrong mode": ({"RAY_AUTH_MODE": "disabled"}, TOKEN + "but RAY_AUTH_MODE is 'disabled' here"),
}


@pytest.mark.parametrize(("settings", "finding"), REFUSED.values(), ids=REFUSED.keys())
def test_what_is_missing_is_said(
    started: Started, settings: dict[str, str], finding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(PoolError) as caught:
        find_in(started.env | settings, started.address, monkeypatch)
    assert finding in str(caught.value) and "\n" not in str(caught.value)


def test_a_token_is_found_where_ray_looks_for_it(
    started: Started, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    token = (started.home / ".ray" / "auth_token").read_text()
    (tmp_path / "token").write_text(token)
    there = find_in(started.env, "auto", monkeypatch)
    assert there[1] == "token"
    homeless = started.env | {"HOME": "/nowhere"}
    for settings in ({"RAY_AUTH_TOKEN": token}, {"RAY_AUTH_TOKEN_PATH": str(tmp_path / "token")}):
        assert find_in(homeless | settings, started.address, monkeypatch) == there
    assert find_in(started.env | {"RAY_AUTH_MODE": "token"}, started.address, monkeypatch) == there


def test_where_no_cluster_is(started: Started, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody listens at the first port; at the second somebody does who never answers."""
    _live_in(started.env, monkeypatch)
    with pytest.raises(PoolError, match=r"workers\.address 127\.0\.0\.1:1: no Ray cluster answers there"):
        find_cluster("127.0.0.1:1")
    with socket.create_server(("0.0.0.0", 0)) as server, pytest.raises(PoolError, match="no answer of a Ray head"):
        find_cluster(f"127.0.0.1:{server.getsockname()[1]}")


def test_a_machine_that_is_no_node_of_the_cluster(
    started: Started, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The head's own node is gone; the node that runs here is another cluster's."""
    with own_nodes(tmp_path) as nodes:
        port = str(free_port())
        group = nodes.start(
            {**nodes.env, "RAY_AUTH_MODE": "disabled"}, "--head", "--port", port, "--include-dashboard", "false"
        )
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if (process / "comm").read_text().strip() == "raylet" and os.getpgid(int(process.name)) == group:
                    os.kill(int(process.name), signal.SIGKILL)
        with pytest.raises(PoolError, match=r"this machine is no node of it.* `ray start --address \S+` .*--submit"):
            find_in(nodes.env, f"127.0.0.1:{port}", monkeypatch)


def test_a_cluster_without_tokens(ray_address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    monkeypatch.setenv("RAY_AUTH_TOKEN", "0" * 64)
    assert find_cluster(ray_address)[1] == "disabled"
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    with pytest.raises(PoolError, match="RAY_AUTH_MODE is token here, but this cluster was started without"):
        find_cluster(ray_address)


def find_in(env: Mapping[str, str], address: str, monkeypatch: pytest.MonkeyPatch) -> tuple[str, str]:
    _live_in(env, monkeypatch)
    return find_cluster(address)


def _live_in(env: Mapping[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Take over what Ray reads of an environment."""
    for key in SETTINGS:
        monkeypatch.delenv(key, raising=False)
    for key in (*SETTINGS, "HOME", "RAY_TMPDIR"):
        if key in env:
            monkeypatch.setenv(key, env[key])
