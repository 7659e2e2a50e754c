"""Those who are told of the ends of searches: signed, once, and again where it failed."""

from __future__ import annotations

import hashlib
import hmac
import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from search_lab import reranked_search
from sqlalchemy import select
from store_samples import scored, search, split
from waiting import PATIENT_S

from moevolve.evaluators.errors import UserError
from moevolve.search.loop.standings import standings
from moevolve.search.server.settings import WebhookSection
from moevolve.search.server.webhooks import ATTEMPTS, Webhooks
from moevolve.store.records import Event
from moevolve.store.repository import Store
from moevolve.store.tables import deliveries

KEY = b"a key of theirs"


class Receiver:
    """Whoever is told: keeps what it gets, and fails the first few times."""

    def __init__(self) -> None:
        self.got: list[dict[str, Any]] = []
        self.refuse = 0
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                at, _, digest = self.headers["x-moevolve-signature"].removeprefix("t=").partition(",v1=")
                expected = hmac.new(KEY, f"{at}.".encode() + body, hashlib.sha256).hexdigest()
                assert hmac.compare_digest(digest, expected) and abs(int(at) - time.time()) < 60
                outer.got.append(json.loads(body))
                outer.refuse -= 1
                self.send_response(302 if outer.refuse >= 0 else 204)
                self.send_header("location", "/elsewhere")
                self.end_headers()

            def log_message(self, *_: object) -> None: ...

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def target(self, *statuses: str) -> WebhookSection:
        url = f"http://127.0.0.1:{self.server.server_address[1]}/hook"
        return WebhookSection.model_validate({"url": url, "secret_env": "THEIR_KEY", "on": statuses})


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Receiver]:
    monkeypatch.setenv("THEIR_KEY", KEY.decode())
    found = Receiver()
    yield found
    found.server.shutdown()
    found.server.server_close()


@pytest.fixture(params=["sqlite", "postgres"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    sqlite = request.param == "sqlite"
    url = f"sqlite:///{tmp_path / 's.db'}" if sqlite else str(request.getfixturevalue("empty_postgres"))
    with Store.open(url) as opened:
        for name in ("alpha", "beta"):
            opened.create_search(search(name), [split()])
        scored(opened, "id-alpha", 0, 0.5)
        yield opened


def wait_for(true: Any) -> None:
    deadline = time.monotonic() + PATIENT_S
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_ends_are_told_once_however_many_servers_run(store: Store, receiver: Receiver) -> None:
    targets = (receiver.target("finished", "failed"),)
    with Webhooks(store, targets, 0.02), Webhooks(store, targets, 0.03):
        store.set_status("id-alpha", "running")
        store.set_status("id-alpha", "finished")
        store.set_status("id-beta", "failed", "PoolError: no room: none")
        store.set_status("id-beta", "cancelled", "asked for")
        wait_for(lambda: len(receiver.got) >= 2)
        time.sleep(0.3)
    with Webhooks(store, targets, 0.02):
        time.sleep(0.2)
    told = {one["search"]: one for one in receiver.got}
    assert len(receiver.got) == len(told) == 2
    alpha = told["alpha"]
    assert (alpha["event"], alpha["best_on_search"], alpha["reason"]) == ("search.finished", "alpha:0", None)
    assert alpha["winner"] is None, "its settings are no configuration: nothing says who won"
    assert (told["beta"]["event"], told["beta"]["reason"]) == ("search.failed", "PoolError: no room: none")


def test_the_winner_is_the_one_of_the_final_table(tmp_path: Path, receiver: Receiver) -> None:
    with Store.open(f"sqlite:///{tmp_path / 's.db'}") as store:
        record = reranked_search(store)
        with Webhooks(store, (receiver.target("finished", "interrupted"),), 0.02):
            store.set_status(record.id, "interrupted")
            store.set_status(record.id, "finished")
            wait_for(lambda: len(receiver.got) == 2)
        found = standings(store, store.search(record.id), store.history(record.id))
    interrupted, finished = receiver.got
    assert interrupted["best_on_search"] == finished["best_on_search"] == "reranked:0"
    assert finished["winner"] == found.winner == "reranked:1" and interrupted["winner"] is None


def test_what_failed_is_tried_again_and_not_for_ever(store: Store, receiver: Receiver) -> None:
    receiver.refuse = 2
    targets = (receiver.target("finished"),)
    with Webhooks(store, targets, 0.02, 0.02):
        store.set_status("id-alpha", "finished")
        wait_for(lambda: len(receiver.got) == 3)
        receiver.got.clear()
        receiver.refuse = 10**6
        store.set_status("id-beta", "finished")
        wait_for(lambda: len(receiver.got) == ATTEMPTS)
        time.sleep(0.3)
    assert len(receiver.got) == ATTEMPTS and {one["search"] for one in receiver.got} == {"beta"}


def test_a_target_that_cannot_be_told_keeps_nothing_from_the_others_and_no_url_is_kept(
    tmp_path: Path, receiver: Receiver, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = "T0KEN"
    hosts = ("a" * 64 + ".example.org", "xn--\u0378.example.org", "me:T0KEN@[")
    bad = [
        WebhookSection.model_validate({"url": f"https://{host}/{secret}?{secret}", "secret_env": "THEIR_KEY"})
        for host in hosts
    ]
    with Store.open(f"sqlite:///{tmp_path / 's.db'}") as store:
        store.create_search(search("alpha"), [split()])
        with Webhooks(store, (*bad, receiver.target("finished", "failed")), 0.02, 60):
            for status in ("finished", "failed"):
                store.set_status("id-alpha", status)
            wait_for(lambda: len(receiver.got) == 2)
            # Nor does an event that can't be told.
            body = Webhooks._body

            def broken(self: Webhooks, event: Event) -> bytes:
                if event.text == "finished":
                    raise KeyError(event.text)
                return body(self, event)

            monkeypatch.setattr(Webhooks, "_body", broken)
            for status in ("running", "finished", "failed"):
                store.set_status("id-alpha", status)
            wait_for(lambda: len(receiver.got) == 3)
        with store.transaction() as connection:
            kept = connection.execute(select(deliveries)).all()
    assert len(kept) == 4 * 4 and len({row.target for row in kept}) == 4
    assert secret not in f"{kept}{caplog.text}" and "example.org was not told of finished" in caplog.text
    assert {row.outcome for row in kept if "127.0.0.1" in row.target} == {"told", "KeyError"}


def test_a_missing_key_is_named(store: Store, receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("THEIR_KEY")
    with pytest.raises(UserError, match="signed with the environment variable THEIR_KEY: set it"):
        Webhooks(store, (receiver.target("finished"),))
