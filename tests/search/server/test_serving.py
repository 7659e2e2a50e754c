"""The installed server: host names, idle connections, and a search that is run through its API and outlives it."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
import pytest
import uvicorn
import yaml
from killing import MOEVOLVE, count
from served_here import served_here
from server_tokens import READ, WRITE
from waiting import PATIENT_S, until

from moevolve.search.server.connections import BACKLOG
from moevolve.search.server.serve import ServeRequest
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


def test_a_server_for_other_machines_answers_to_its_names(served: Served) -> None:
    name, port = served.url.removeprefix("http://").split(":")
    assert name == socket.gethostname(), "an address that works elsewhere"
    for host, status in {"one.example": 200, "localhost.example": 200, "two.example": 400}.items():
        headers = {"host": host, "authorization": f"Bearer {WRITE}"}
        answer = httpx2.get(f"http://127.0.0.1:{port}/api/searches", headers=headers, timeout=PATIENT_S)
        assert answer.status_code == status, "also the first one, for which the server imports for seconds"


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


def test_responses_on_a_kept_connection_are_sent_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    async def ask_twice(server: uvicorn.Server, listening: socket.socket) -> None:
        serving = asyncio.ensure_future(server.serve([listening]))
        reader, writer = await asyncio.open_connection(*listening.getsockname())
        for _ in range(2):
            writer.write(b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n")
            assert (await asyncio.wait_for(reader.readuntil(b"ok\n"), PATIENT_S)).startswith(b"HTTP/1.1 200 ")
            (connection,) = server.server_state.connections
            accepted = connection.transport.get_extra_info("socket")
            asked.append(accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        writer.close()
        server.should_exit = True
        await serving

    monkeypatch.setattr(uvicorn.Server, "run", lambda server, sockets: asyncio.run(ask_twice(server, sockets[0])))
    ServeRequest(store=f"sqlite:///{tmp_path / 'lab.db'}", port=0).answer()
    assert asked == [1, 1]


@pytest.mark.slow
def test_a_search_is_launched_paused_stopped_and_resumed_from_elsewhere(tiny: Any, tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text(f"read {READ}\nwrite {WRITE}\n")
    tokens.chmod(0o600)
    (tmp_path / "runs").mkdir()
    tiny.write_run(tmp_path / "runs" / "small.yaml", "calm")
    (tmp_path / "server.yaml").write_text(yaml.safe_dump({"configurations": ["runs"], "tokens": "tokens"}))
    database = tmp_path / "moevolve.db"
    settings = read_settings(tmp_path / "server.yaml", {"store": f"sqlite:///{database}", "logs": tmp_path / "logs"})
    headers = {"authorization": f"Bearer {WRITE}", "x-moevolve": "1"}
    connect = partial(httpx2.Client, headers=headers, timeout=PATIENT_S)

    def status(client: httpx2.Client) -> str:
        return str(client.get("/api/searches/calm").json()["search"]["status"])

    asked, other = {"configuration": "small", "overrides": {"window": 2}}, {"configuration": "small"}
    with served_here(settings, "slow_pool") as url, connect(base_url=url) as client:
        assert client.post("/api/searches", json={"configuration": "big"}).status_code == 404
        assert client.post("/api/searches", json=asked).status_code == 202
        until(lambda: count(database) > 1)
        assert client.post("/api/searches/calm/pause", json={}).json()["desired_state"] == "paused"
        until(lambda: status(client) == "paused")
    # The server is gone, the search has stayed.
    with served_here(settings, "local_pool") as url, connect(base_url=url) as client:
        assert 1 < count(database) < 24
        assert client.post("/api/searches/calm/stop", json={}).status_code == 200
        until(lambda: status(client) == "interrupted")
        assert client.post("/api/searches/calm/resume", json={}).status_code == 202
        until(lambda: status(client) == "finished")
        assert client.get("/api/searches/calm/standings").json()["winner"].startswith("calm:")
        assert count(database) == 24
        assert client.post("/api/searches", json=other).status_code == 409
