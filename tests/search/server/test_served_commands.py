"""Commands with a server: the same commands and output, by names that the server knows."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import pytest
import yaml
from killing import MOEVOLVE, Forked, count
from served_here import served_here
from server_tokens import READ, WRITE
from waiting import PATIENT_S, until

import moevolve as api
from moevolve.search.server.connections import BACKLOG
from moevolve.search.server.settings import read_settings


@dataclass(frozen=True)
class Served:
    """A running server, and the URL of its store."""

    url: str
    store: str


@pytest.fixture(scope="module")
def served(lab_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """The installed server, for other machines, which may have few files open."""
    folder = tmp_path_factory.mktemp("served")
    shutil.copy(lab_file, folder / "lab.db")
    store = f"sqlite:///{folder / 'lab.db'}"
    few = ["bash", "-c", 'ulimit -n 256 && exec "$0" "$@"', MOEVOLVE]
    hosts = "--host", "0.0.0.0", "--hosts", "one.example", "--hosts", "localhost.example"
    process = subprocess.Popen(
        [*few, "serve", "--store", store, "--port", "0", *hosts],
        cwd=folder,
        env=dict(os.environ) | {"MOEVOLVE_READ_TOKEN": READ, "MOEVOLVE_WRITE_TOKEN": WRITE},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line.startswith("serving at http://"), line + process.stdout.read()
    yield Served(line.split()[2].rstrip(",;"), store)
    process.send_signal(signal.SIGTERM)
    assert process.wait(PATIENT_S) == 0 and process.stdout.read() == "", "it complained of something"


READING = (("searches", "--json"), ("best", "--limit", "2"), ("show", "lab:3"), ("lineage", "lab:50", "--dot"))


def test_reading_commands_print_the_same_for_a_server_and_its_store(
    served: Served, in_process: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("MOEVOLVE_STORE", "MOEVOLVE_SERVER", "MOEVOLVE_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    name, port = served.url.removeprefix("http://").split(":")
    assert name == socket.gethostname(), "an address that works elsewhere"
    for host, status in {"one.example": 200, "localhost.example": 200, "two.example": 400}.items():
        headers = {"host": host, "authorization": f"Bearer {WRITE}"}
        answer = httpx2.get(f"http://127.0.0.1:{port}/api/searches", headers=headers, timeout=PATIENT_S)
        assert answer.status_code == status, "also the first one, for which the server imports for seconds"
    refused = in_process("searches", "--server", served.url)
    assert refused.returncode == 2 and f"{served.url}: it wants a token: set MOEVOLVE_TOKEN" in refused.stderr
    monkeypatch.setenv("MOEVOLVE_TOKEN", READ)
    for command in READING:
        there = in_process(*command, "--server", served.url)
        here = in_process(*command, "--store", served.store)
        assert (there.returncode, there.stdout) == (here.returncode, here.stdout) == (0, here.stdout), command
        assert there.stdout.strip()
    assert in_process("report", "lab", "-o", "report.html", "--server", served.url).returncode == 0
    assert "Search lab" in (tmp_path / "report.html").read_text()
    monkeypatch.setenv("MOEVOLVE_SERVER", served.url)
    for command, said in {
        ("show", "lab:999"): "no individual 'lab:999'; nearest: lab:",
        ("pause", "lab"): "this token may read only",
    }.items():
        failed = in_process(*command)
        assert failed.returncode == 2 and said in failed.stderr, (command, failed.stderr)


def test_a_folder_that_takes_no_uploads_is_refused_before_serving(in_process: Any, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "within", tmp_path / "none" / "within", Path("/proc/self")):
        refused = in_process("serve", "--store", "sqlite:///new.db", "--port", "0", "--uploads", str(folder))
        assert refused.returncode == 2 and refused.stderr.count("\n") == 1, refused.stderr
        assert f"uploads: no file can be written into {folder}: " in refused.stderr
    assert not (tmp_path / "none").exists() and not (tmp_path / "new.db").exists()


def test_idle_connections_keep_no_client_out(served: Served) -> None:
    port = int(served.url.rpartition(":")[2])
    with ExitStack() as silent:
        # The last thing is an answer: uvicorn waits in vain for connections that it accepts while it shuts down.
        for place in range(5 * BACKLOG):
            silent.enter_context(socket.create_connection(("127.0.0.1", port), PATIENT_S))
            if place % BACKLOG == BACKLOG - 1:  # more at once would be asked to come again in a second
                assert httpx2.get(f"http://127.0.0.1:{port}/healthz", timeout=PATIENT_S).text == "ok\n"


@pytest.mark.slow
def test_a_search_is_launched_watched_stopped_and_resumed_from_elsewhere(
    tiny: Any, in_process: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text(f"read {READ}\nwrite {WRITE}\n")
    tokens.chmod(0o600)
    (tmp_path / "runs").mkdir()
    tiny.write_run(tmp_path / "runs" / "small.yaml", "calm")
    (tmp_path / "server.yaml").write_text(yaml.safe_dump({"configurations": ["runs"], "tokens": "tokens"}))
    database, log = tmp_path / "moevolve.db", tmp_path / "watched.log"
    settings = read_settings(tmp_path / "server.yaml", {"store": f"sqlite:///{database}", "logs": tmp_path / "logs"})
    monkeypatch.setenv("MOEVOLVE_TOKEN", WRITE)

    with served_here(settings, "slow_pool") as url:
        monkeypatch.setenv("MOEVOLVE_SERVER", url)
        assert "no configuration 'big': there are small" in in_process("launch", "big").stderr
        assert "can't be set over the network" in in_process("launch", "small", "--set", "model.path=/etc").stderr
        watched = Forked(["launch", "small", "--set", "window=2"], tmp_path, log=log, env=dict(os.environ))
        until(lambda: count(database) > 1, watched)
        assert api.pause(url, "calm").desired_state == "paused"
        until(lambda: api.searches(url)[0].search.status == "paused")
        until(lambda: "\ncalm: " in f"\n{log.read_text()}", watched)  # who watches sees that it began
        os.kill(watched.pid, signal.SIGINT)
        said, _ = watched.communicate(PATIENT_S)
        assert f"the search goes on; end it with: moevolve stop calm --server {url}" in said
    # Who watched is gone, the server is gone, the search has stayed.
    with served_here(settings, "local_pool") as url:
        monkeypatch.setenv("MOEVOLVE_SERVER", url)
        assert 1 < count(database) < 24
        assert in_process("stop", "calm").returncode == 0
        until(lambda: api.searches(url)[0].search.status == "interrupted")
        resumed = in_process("resume", "calm", "--json")
        assert resumed.returncode == 0, resumed.stderr
        assert json.loads(resumed.stdout)["winner"].startswith("calm:") and count(database) == 24
        other = in_process("launch", "small", "--set", "seed=9")
        assert other.returncode == 2 and "search calm has other settings" in other.stderr
