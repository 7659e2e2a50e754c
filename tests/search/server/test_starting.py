"""Searches that are steered before they have a driver, and again right after they were asked to stop."""

from __future__ import annotations

import getpass
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from page_checks import page_of
from server_tokens import WRITE, write_runs
from starlette.testclient import TestClient
from store_samples import search, split
from waiting import until

from moevolve.search.server.app import make_app
from moevolve.search.server.settings import ServerSettings
from moevolve.store.repository import Store

HEADERS = {"authorization": f"Bearer {WRITE}", "x-moevolve": "1"}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    with Store.open(f"sqlite:///{tmp_path_factory.mktemp('store') / 'lab.db'}") as opened:
        opened.create_search(search("alpha"), [split()])
        yield opened


@pytest.fixture(scope="module")
def served(store: Store, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    folder = tmp_path_factory.mktemp("served")
    settings = ServerSettings(configurations=(write_runs(folder),), logs=folder / "logs", hosts=("testserver",))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MOEVOLVE_WRITE_TOKEN", WRITE)
        app = make_app(store, settings)
    with TestClient(app, headers=HEADERS) as found:
        yield found


@pytest.fixture
def client(served: TestClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TestClient]:
    """A client of a server whose processes say who asked for them, and sleep; all have ended when a test begins."""
    script = tmp_path / "asleep"
    script.write_text("#!/bin/sh\necho asked by $MOEVOLVE_ASKER\nexec sleep 60\n")
    script.chmod(0o700)
    monkeypatch.setattr("sys.executable", str(script))
    yield served
    for job in served.get("/api/launches").json():
        served.post(f"/api/searches/{job['name']}/stop")
    until(lambda: not any(job["running"] for job in served.get("/api/launches").json()))


def job_of(client: TestClient, name: str) -> Any:
    (found,) = [job for job in client.get("/api/launches").json() if job["name"] == name]
    return found


def test_a_launch_ends_before_its_search_is_stored(client: TestClient) -> None:
    assert client.post("/api/searches/calm/stop").status_code == 404, "nobody starts it"
    assert client.post("/api/searches", json={"configuration": "small"}).status_code == 202
    asked = client.post("/api/searches/calm/stop").json()
    assert asked["alive"] and asked["owner"] == f"process {job_of(client, 'calm')['process']} of the server"
    until(lambda: not job_of(client, "calm")["running"])
    page = page_of(client, "/launch")
    assert "stopped while it started" in page.text and "failed" not in page.text
    assert client.get("/api/searches/calm").status_code == 404
    assert client.post("/api/searches", json={"configuration": "small"}).status_code == 202, "and may be launched again"


def test_a_log_is_there_from_the_first_second_and_requests_have_names(client: TestClient, store: Store) -> None:
    assert client.get("/api/searches/logged/log").status_code == 404
    client.post("/api/searches", json={"configuration": "small", "name": "logged"})
    until(lambda: "asked by" in client.get("/api/searches/logged/log").text)
    first, second = client.get("/api/searches/logged/log").text.splitlines()
    assert " UTC: moevolve launch " in first and "--name logged" in first
    token = "the write token"
    assert second == f"asked by {token}"
    arrival = client.get("/launch/arrival?name=logged&part=1", headers={"accept": "text/html"}).text
    assert f"asked by {token}" in arrival
    page = page_of(client, "/searches/logged")
    assert "Search logged" in page.text and f"asked by {token}" in page.text, "not stored yet"
    assert any(found.get("hx-get") == "/launch/arrival?name=logged&part=1" for found in page.all("div"))
    assert client.get("/searches/nobody").status_code == 404
    lease = store.acquire("id-alpha", "driver", 600)
    client.post("/api/searches/alpha/pause")
    store.ask("id-alpha", "running")
    asked = [event["text"] for event in client.get("/api/events?kind=asked&kind=retried").json()]
    user = f"{getpass.getuser()} on {socket.gethostname()}"
    assert asked == [f"to be running, by {user}", f"to be paused, by {token}"]
    store.release(lease)


def test_a_real_launch_leaves_nothing(client: TestClient, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", f"{sys.prefix}/bin/python")
    client.post("/api/searches", json={"configuration": "small", "name": "real"})
    client.post("/api/searches/real/stop")
    until(lambda: not job_of(client, "real")["running"])
    assert list(store.controls()) == ["id-alpha"]


def test_what_starts_can_be_stopped_only(client: TestClient) -> None:
    assert client.post("/api/searches/alpha/pause").status_code == 409, "nobody runs it"
    assert client.post("/api/searches/alpha/resume").status_code == 202
    assert client.post("/api/searches/alpha/pause").status_code == 409
    now = page_of(client, "/searches/alpha/now")
    assert "starting a process of this server reads the model" in now.text and "rte Stop The" in now.text
    assert client.post("/api/searches/alpha/stop").json()["desired_state"] == "stopped"


def test_resuming_right_after_stopping_says_when_to_try_again(client: TestClient, store: Store) -> None:
    lease = store.acquire("id-alpha", "driver", 600)
    already = client.post("/api/searches/alpha/resume")
    assert already.status_code == 409 and "is being run by driver already" in already.json()["detail"]
    assert client.post("/api/searches/alpha/stop").status_code == 200
    early = client.post("/api/searches/alpha/resume")
    assert (early.status_code, early.headers["retry-after"]) == (409, "5")
    assert early.json()["detail"] == "search alpha is ending, as it was asked to; try again in 5 s"
    store.release(lease)
    assert client.post("/api/searches/alpha/resume").status_code == 202
    twice = client.post("/api/searches/alpha/resume")
    assert (twice.status_code, twice.headers["retry-after"]) == (409, "5") and "process" in twice.json()["detail"]
