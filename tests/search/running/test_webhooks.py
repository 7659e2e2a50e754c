"""Those who are told how a search ended: by its driver, signed, again where it failed, and without a URL in the log."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
from disturbed_lab import local_pool, setup_of
from store_samples import search, split

from moevolve.evaluators.errors import UserError
from moevolve.search.loop.setup import SearchSetup
from moevolve.search.pools.local import LocalPool
from moevolve.search.running.execute import execute
from moevolve.search.running.launch import register
from moevolve.search.running.observer import Observer
from moevolve.search.running.webhooks import (
    PAUSES_S,
    VARIABLE,
    WebhookSection,
    environment_of,
    posting_webhooks,
    targets_of_environment,
)
from moevolve.store.errors import LeaseLostError
from moevolve.store.repository import Store

KEY = b"a key of theirs"
SECRET = f"whsec_{base64.b64encode(KEY).decode()}"
AT_ONCE = [0.0] * len(PAUSES_S)


class Receiver:
    """Whoever is told: keeps what it gets, and fails the first few times."""

    def __init__(self) -> None:
        self.got: list[dict[str, Any]] = []
        self.refuse = 0
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                name, at = self.headers["webhook-id"], self.headers["webhook-timestamp"]
                digest = hmac.new(KEY, f"{name}.{at}.".encode() + body, hashlib.sha256).digest()
                assert self.headers["webhook-signature"] == f"v1,{base64.b64encode(digest).decode()}"
                assert abs(int(at) - time.time()) < 60
                told = json.loads(body)
                outer.got.append({"name": name, "type": told["type"], **told["data"]})
                outer.refuse -= 1
                self.send_response(302 if outer.refuse >= 0 else 204)
                self.send_header("location", "/elsewhere")
                self.end_headers()

            def log_message(self, *_: object) -> None: ...

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_address[1]}/hook"


Notify = Callable[..., None]


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    found = Receiver()
    yield found
    found.server.shutdown()
    found.server.server_close()


@pytest.fixture
def notify(monkeypatch: pytest.MonkeyPatch) -> Notify:
    """Have searches of this process tell these URLs of these statuses."""
    monkeypatch.setenv("THEIR_KEY", SECRET)

    def give(*urls: str, on: tuple[str, ...] = ("finished", "failed")) -> None:
        given = [{"url": url, "secret_env": "THEIR_KEY", "on": on} for url in urls]
        targets = [WebhookSection.model_validate(one) for one in given]
        monkeypatch.setenv(*next(iter(environment_of(targets).items())))

    return give


@pytest.fixture
def store(store: Store) -> Store:
    store.create_search(search("alpha"), [split()])
    return store


@pytest.fixture
def setup(store: Store) -> SearchSetup:
    recorded = setup_of(store.url)
    register(recorded, store)
    return recorded


def test_a_driver_tells_once_how_its_search_ended_and_who_won(
    setup: SearchSetup, store: Store, receiver: Receiver, notify: Notify
) -> None:
    notify(receiver.url, on=("finished",))
    table = execute(setup, store, Observer(), local_pool)
    execute(setup, store, Observer(), local_pool)  # it had ended before
    (told,) = receiver.got
    (best,) = store.best_of_search("id-lab", 1)
    number = next(one.seq for one in store.latest_events("id-lab") if one.text == "finished")
    known = {"search": "lab", "id": "id-lab", "number": number, "name": f"id-lab.{number}", "reason": None}
    found = {"winner": table.winner, "best_on_search": f"lab:{best.index}"}
    assert told == {"type": "search.finished", **known, **found}


def test_a_failure_is_told_with_its_reason_and_an_interruption_to_who_asks_for_it(
    setup: SearchSetup, store: Store, receiver: Receiver, notify: Notify
) -> None:
    failures: list[BaseException] = [KeyboardInterrupt(), ValueError("no worker")]

    def broken(_: SearchSetup) -> LocalPool:
        raise failures.pop(0)

    for on in (("finished", "failed"), ("failed",)):
        notify(receiver.url, on=on)
        with pytest.raises((KeyboardInterrupt, ValueError)):
            execute(setup, store, Observer(), broken)
    (told,) = receiver.got
    assert (told["type"], told["reason"], told["winner"]) == ("search.failed", "ValueError: no worker", None)
    failures.append(KeyboardInterrupt())
    notify(receiver.url, on=("interrupted",))
    with pytest.raises(KeyboardInterrupt):
        execute(setup, store, Observer(), broken)
    assert receiver.got[1]["type"] == "search.interrupted"


@pytest.mark.parametrize("refused", [2, 99])
def test_what_failed_is_tried_again_and_not_for_ever(
    store: Store, receiver: Receiver, notify: Notify, refused: int, caplog: pytest.LogCaptureFixture
) -> None:
    notify(receiver.url)
    receiver.refuse = refused
    with posting_webhooks(store, "id-alpha", AT_ONCE):
        store.set_status("id-alpha", "failed", "PoolError: full")
    assert len(receiver.got) == 3
    assert {told["name"] for told in receiver.got} == {f"id-alpha.{store.latest_events('id-alpha', 1)[0].seq}"}
    assert ("did not take failed: PoolError: full in 3 attempts" in caplog.text) == (refused > 2)
    assert caplog.text.count("it answered 302") == min(refused, 3)


def test_who_lost_the_search_says_nothing_of_its_end(store: Store, receiver: Receiver, notify: Notify) -> None:
    notify(receiver.url)
    with pytest.raises(LeaseLostError), posting_webhooks(store, "id-alpha", AT_ONCE):
        end_elsewhere(store)
    assert not receiver.got


def end_elsewhere(store: Store) -> None:
    store.set_status("id-alpha", "finished")  # by who took it over
    raise LeaseLostError("another one's")


def test_a_target_that_cannot_be_told_keeps_nothing_from_the_others_and_no_url_is_logged(
    store: Store, receiver: Receiver, notify: Notify, caplog: pytest.LogCaptureFixture
) -> None:
    hosts = ("a" * 64 + ".example.org", "xn--\u0378.example.org", "me:T0KEN@[", "127.0.0.1:1")
    notify(*(f"https://{host}/T0KEN?T0KEN" for host in hosts), receiver.url)
    with posting_webhooks(store, "id-alpha", AT_ONCE):
        store.set_status("id-alpha", "failed")
    assert len(receiver.got) == 1
    assert "T0KEN" not in caplog.text and caplog.text.count("did not take failed in 3 attempts") == len(hosts)


def test_what_is_wrong_in_the_environment_is_named_before_the_search_runs_and_not_quoted(
    setup: SearchSetup, store: Store, receiver: Receiver, notify: Notify, monkeypatch: pytest.MonkeyPatch
) -> None:
    notify(receiver.url)
    monkeypatch.delenv("THEIR_KEY")
    with pytest.raises(UserError, match="signed with the environment variable THEIR_KEY: set it"):
        execute(setup, store, Observer(), local_pool)
    assert store.history("id-lab") == [] and not store.control("id-lab").alive
    for given in ("T0KEN", '[{"url": "T0KEN", "secret_env": "KEY"}]', '[{"uri": "https://T0KEN"}]'):
        monkeypatch.setenv(VARIABLE, given)
        with pytest.raises(UserError, match=VARIABLE) as raised:
            targets_of_environment()
        assert "T0KEN" not in str(raised.value)
