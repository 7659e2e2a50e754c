"""The client of a server: errors are clear, and the token is never shown."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from search_lab import reranked_search, run_config
from served_here import in_thread
from server_tokens import READ, WRITE
from starlette.testclient import TestClient
from store_samples import search

import moevolve
from moevolve.search.interface.running import ResumeRequest
from moevolve.search.interface.searches import SearchesRequest
from moevolve.search.server import client as client_module
from moevolve.search.server.client import RemoteService
from moevolve.store.repository import Store

URL = "http://localhost:8080"


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MOEVOLVE_STORE", "MOEVOLVE_SERVER", "MOEVOLVE_TOKEN"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def connected(lab_app: Any) -> Callable[[], RemoteService]:
    """A client of a served store, with the token in the environment."""

    def connect() -> RemoteService:
        client = RemoteService(URL)
        client._http = TestClient(lab_app, URL, headers=client._http.headers)
        return client

    return connect


def test_a_wrong_and_a_missing_token_give_different_messages(
    connected: Callable[[], RemoteService], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(moevolve.StoreError, match="it wants a token: set MOEVOLVE_TOKEN"):
        connected().ask(SearchesRequest())
    monkeypatch.setenv("MOEVOLVE_TOKEN", "another-token-0123456789")
    with pytest.raises(moevolve.StoreError, match="it knows no such token as MOEVOLVE_TOKEN has") as refused:
        connected().ask(SearchesRequest())
    assert "another" not in str(refused.value)
    monkeypatch.setenv("MOEVOLVE_TOKEN", f" {READ}\n")  # as files and secrets of a CI have it
    assert connected().ask(SearchesRequest())


def test_a_malformed_token_is_refused_without_showing_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for inside in ("\n", " ", "é", "\x1b", "\x7f"):
        monkeypatch.setenv("MOEVOLVE_TOKEN", f"secret{inside}secret")
        with pytest.raises(moevolve.UserError, match="MOEVOLVE_TOKEN has blanks or characters other") as refused:
            RemoteService(URL)
        assert "secret" not in str(refused.value)


FAILING: dict[tuple[str, ...], str] = {
    ("searches", "--server", "http://["): "a server's URL is http://HOST:PORT or https://HOST; this is none",
    ("searches", "--server", "http://host:port"): "a server's URL is http://HOST:PORT",
    ("searches", "--server", "http://me:secret@127.0.0.1:1"): "a token doesn't belong into a URL",
    ("searches", "--server", f"http://{'a' * 70}.org"): "can't be reached",
    ("searches", "--server", "http://127.0.0.1:1"): "http://127.0.0.1:1 can't be reached",
    ("searches", "--server", "localhost:8098"): "localhost:8098 is no URL: a server's is http://localhost:8098",
    ("pause", "demo", "--store", "[::1]:80"): "[::1]:80 is no URL: a server's is http://[::1]:80",
    ("launch", "demo", "--server", URL, "--or-resume", "--address", "auto"): (
        "on its own cluster: without address and or_resume (--or-resume)"
    ),
}


def test_requests_that_fail_give_one_line(in_process: Any) -> None:
    for arguments, said in FAILING.items():
        done = in_process(*arguments)
        assert done.returncode == 2 and said in done.stderr and done.stderr.count("\n") == 1, done.stderr
        assert "secret" not in done.stderr


def test_resuming_a_finished_search_gives_its_table(
    connected: Callable[[], RemoteService], lab_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab_store.set_status(reranked_search(lab_store).id, "finished")
    monkeypatch.setenv("MOEVOLVE_TOKEN", WRITE)
    begun = []
    found = connected().ask(ResumeRequest("reranked"), observer=moevolve.Observer(on_begin=begun.append))
    assert found is not None and found.winner == "reranked:1"
    assert [(config.name, config.store) for config in begun] == [("reranked", URL)]


def test_following_a_search_reports_a_lost_driver(
    connected: Callable[[], RemoteService], lab_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "_POLL_S", 0.1)
    lab_store.create_search(search("left", config=run_config(name="left").canonical_json()), [])
    lab_store.set_status(lab_store.acquire("id-left", "a driver that is killed", 0.1), "running")
    monkeypatch.setenv("MOEVOLVE_TOKEN", READ)
    with connected() as client, pytest.raises(moevolve.UserError, match="moevolve resume left"):
        client.follow("left", 0, moevolve.Observer())


def test_no_request_meets_a_connection_that_the_server_closes() -> None:
    clients: list[tuple[str, int]] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        clients.append(scope["client"])
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"[]"})

    with in_thread(app, lifespan="off") as (port, _), RemoteService(f"http://127.0.0.1:{port}") as client:
        assert client.ask(SearchesRequest()) == client.ask(SearchesRequest()) == []
    assert clients[0] != clients[1], "each has a connection of its own"
