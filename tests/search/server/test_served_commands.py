"""Commands with a server: the same commands and output, by names that the server knows."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import pytest
import yaml
from killing import MOEVOLVE, count
from server_tokens import READ, WRITE
from waiting import PATIENT_S

import moevolve as api

pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Served:
    """A running server.

    Attributes:
        url: where it is.
        store: URL of its store.
        process: that runs it.
    """

    url: str
    store: str
    process: subprocess.Popen[str]


def serve(folder: Path, store: str, *flags: str) -> Served:
    """Start the installed server on a free port."""
    process = subprocess.Popen(
        [MOEVOLVE, "serve", "--store", store, *(flags if "--port" in flags else ("--port", "0", *flags))],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line.startswith("serving at http://"), line + process.stdout.read()
    return Served(line.split()[2].rstrip(",;"), store, process)


@pytest.fixture(scope="module")
def kinds(all_kinds: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A store with searches of all kinds, served to other machines."""
    hosts = "--hosts", "one.example", "--hosts", "localhost.example"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MOEVOLVE_READ_TOKEN", READ)
        patch.setenv("MOEVOLVE_WRITE_TOKEN", WRITE)
        found = serve(tmp_path_factory.mktemp("served"), all_kinds, "--host", "0.0.0.0", *hosts)
    yield found
    found.process.send_signal(signal.SIGTERM)
    assert found.process.wait(PATIENT_S) == 0


def test_a_server_for_other_machines_prints_urls_that_work(
    kinds: Served, in_process: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, port = kinds.url.removeprefix("http://").split(":")
    assert name == socket.gethostname()
    monkeypatch.setenv("MOEVOLVE_TOKEN", WRITE)
    for url in (kinds.url, f"http://127.0.0.1:{port}"):
        done = in_process("best", "--limit", "1", "--server", url)
        assert done.returncode == 0, done.stderr
    for host, status in {"one.example": 200, "localhost.example": 200, "two.example": 400}.items():
        headers = {"host": host, "authorization": f"Bearer {WRITE}"}
        assert httpx2.get(f"http://127.0.0.1:{port}/api/searches", headers=headers).status_code == status


READING = (
    ("searches", "--json"),
    ("searches",),
    ("best", "--limit", "2"),
    ("best", "--search", "eep", "--by", "search", "--json"),
    ("show", "eep:3", "--json"),
    ("lineage", "eep:10"),
    ("lineage", "eep:0", "--descendants", "--dot"),
)


def test_reading_commands_print_the_same_for_a_server_and_its_store(
    kinds: Served, in_process: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("MOEVOLVE_STORE", "MOEVOLVE_SERVER", "MOEVOLVE_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    refused = in_process("searches", "--server", kinds.url)
    assert refused.returncode == 2 and f"{kinds.url}: it wants a token: set MOEVOLVE_TOKEN" in refused.stderr
    monkeypatch.setenv("MOEVOLVE_TOKEN", READ)
    for command in READING:
        there = in_process(*command, "--server", kinds.url)
        here = in_process(*command, "--store", kinds.store)
        assert (there.returncode, there.stdout) == (here.returncode, here.stdout) == (0, here.stdout), command
        assert there.stdout.strip()
    for command, written in {("report", "eep", "-o"): "r.html", ("plot", "eep", "-o"): "p.png"}.items():
        done = in_process(*command, written, "--server", kinds.url)
        assert done.returncode == 0, done.stderr
        (tmp_path / written).rename(tmp_path / f"there-{written}")
        assert in_process(*command, written, "--store", kinds.store).returncode == 0
        assert len((tmp_path / f"there-{written}").read_bytes()) == len((tmp_path / written).read_bytes())
    monkeypatch.setenv("MOEVOLVE_SERVER", kinds.url)
    ended = in_process("resume", "eep")
    assert ended.returncode == 0 and "best found" in ended.stdout, ended.stderr
    assert in_process("show", "eep:1").returncode == 0
    for command, said in {
        ("show", "eep:999"): "no individual 'eep:999'; nearest: eep:",
        ("pause", "eep"): "this token may read only",
        ("evaluate", "eep:1", "--task", "demo-count"): "this needs the store itself",
        ("launch", "demo", "--address", "auto"): "launches its own configurations",
        ("searches", "--server", "http://127.0.0.1:1"): "http://127.0.0.1:1 can't be reached",
        ("searches", "--server", "http://me:secret@127.0.0.1:1"): "a token doesn't belong into a URL",
    }.items():
        failed = in_process(*command)
        assert failed.returncode == 2 and said in failed.stderr, (command, failed.stderr)
        assert "secret" not in failed.stderr


def test_a_search_is_launched_watched_stopped_and_resumed_from_elsewhere(
    tiny: Any,
    uninterrupted: Any,
    snapshot: Any,
    ray_address: str,
    in_process: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text(f"read {READ}\nwrite {WRITE}\n")
    tokens.chmod(0o600)
    (tmp_path / "runs").mkdir()
    tiny.write_slow_run(tmp_path / "runs" / "small.yaml", "calm")
    settings = tmp_path / "server.yaml"
    settings.write_text(
        yaml.safe_dump({"configurations": ["runs"], "address": ray_address, "tokens": str(tokens), "logs": "logs"})
    )
    database = tmp_path / "moevolve.db"
    served = serve(tmp_path, f"sqlite:///{database}", "--settings", str(settings))
    for name, value in {"MOEVOLVE_TOKEN": WRITE, "MOEVOLVE_SERVER": served.url}.items():
        monkeypatch.setenv(name, value)

    try:
        assert "no configuration 'big': there are small" in in_process("launch", "big").stderr
        for key in ("model.path=/etc", "store=sqlite:///x.db", "engine.threads=3"):
            assert "can't be set over the network" in in_process("launch", "small", "--set", key).stderr
        log = tmp_path / "watched.log"
        with log.open("w") as file:
            command = [MOEVOLVE, "launch", "small", "--set", "workers.num_cpus=0.5"]
            watched = subprocess.Popen(command, env=dict(os.environ), stdout=file, stderr=subprocess.STDOUT, text=True)
        until(lambda: count(database) > 1, watched)
        assert api.pause(served.url, "calm").desired_state == "paused"
        until(lambda: api.searches(served.url)[0].search.status == "paused")
        until(lambda: "\ncalm: " in f"\n{log.read_text()}", watched)  # who watches sees that it began
        # Who watches goes, the server goes, the search stays.
        watched.send_signal(signal.SIGINT)
        watched.wait(PATIENT_S)
        assert f"the search goes on; end it with: moevolve stop calm --server {served.url}" in log.read_text()
        served.process.kill()
        served.process.wait()
        port = served.url.rpartition(":")[2]
        served = serve(tmp_path, f"sqlite:///{database}", "--settings", str(settings), "--port", port)
        assert 1 < count(database) < 24
        assert in_process("stop", "calm").returncode == 0
        until(lambda: api.searches(served.url)[0].search.status == "interrupted")
        resumed = in_process("resume", "calm", "--json")
        assert resumed.returncode == 0, resumed.stderr
        assert json.loads(resumed.stdout)["winner"].startswith("calm:")
        assert snapshot(database, "calm") == uninterrupted
        other = in_process("launch", "small", "--set", "seed=9")
        assert other.returncode == 2 and "search calm has other settings" in other.stderr
    finally:
        served.process.terminate()
        served.process.wait(PATIENT_S)


def until(true: Any, process: subprocess.Popen[str] | None = None) -> None:
    deadline = time.monotonic() + PATIENT_S
    while not true():
        assert process is None or process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)
