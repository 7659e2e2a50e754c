"""Attacks on a running server, as bytes on raw sockets: a client library would refuse to send most of them."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
from search_lab import UnrulyPool, drive, run_config, start
from served_here import in_thread
from server_tokens import READ, WRITE, write_runs
from sqlalchemy import update
from starlette.testclient import TestClient
from store_samples import search, split
from waiting import PATIENT_S, until

from moevolve.search.server.app import make_app
from moevolve.search.server.connections import BoundedProtocol
from moevolve.search.server.settings import ServerSettings
from moevolve.store.errors import StoreError
from moevolve.store.repository import Store
from moevolve.store.session import make_engine, transaction
from moevolve.store.tables import individuals, searches

WRITER = f"authorization: Bearer {WRITE}\r\nx-moevolve: 1\r\n"


class ImpatientProtocol(BoundedProtocol):
    """Connections that wait less long for clients to read."""

    send_timeout_s = 1.0
    max_requests = 500


@dataclass(frozen=True)
class Served:
    """A server on this machine with tokens, and its store."""

    port: int
    store: Store
    connections: AbstractSet[object]

    def connect(self, receive_buffer: int | None = None) -> socket.socket:
        opened = socket.socket()
        if receive_buffer is not None:
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        opened.settimeout(PATIENT_S)
        opened.connect(("127.0.0.1", self.port))
        return opened

    def send(self, request: str | bytes) -> bytes:
        """All that comes back until the server closes the connection, or for a while."""
        with self.connect() as opened:
            opened.sendall(request.encode() if isinstance(request, str) else request)
            return b"".join(iter(lambda: opened.recv(1 << 16), b""))

    def ask(self, path: str, body: bytes | None = None, headers: str = WRITER, method: str = "") -> tuple[int, bytes]:
        """Status and body of one request on its own connection."""
        method = method or ("GET" if body is None else "POST")
        head = f"{method} {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n{headers}"
        if body is not None:
            head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n"
        head, _, content = self.send(f"{head}\r\n".encode() + (body or b"")).partition(b"\r\n\r\n")
        return int(head.split()[1]), content


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("served")
    runs = write_runs(folder)
    (folder / "tokens").write_text(f"read {READ}\nwrite {WRITE}\n")
    (folder / "tokens").chmod(0o600)
    settings = ServerSettings(
        store=f"sqlite:///{folder / 'lab.db'}",
        tokens=folder / "tokens",
        logs=folder / "logs",
        configurations=(runs,),
        hosts=("xn--bcher-kva.example", "xn--strae-oqa.example"),
    )
    with Store.open(settings.store) as store:
        drive(store, start(store, run_config()), UnrulyPool(seed=1))
        store.create_search(search("alpha"), [split()])
        with in_thread(make_app(store, settings), http=ImpatientProtocol, ws="none", log_level="critical") as (
            port,
            server,
        ):
            yield Served(port, store, server.server_state.connections)


def test_only_text_that_can_be_stored_is_accepted(served: Served) -> None:
    for path in ("/api/searches/check", "/launch?part=1", "/api/searches/lab/scale"):
        for evil in (r"\ud800", r"\udfff x", r"a\u0000b"):
            body = f'{{"configuration": "small", "overrides": {{"genome.kind": "{evil}"}}}}'.encode()
            status, content = served.ask(path, body)
            assert status == 422 and b"unpaired surrogate or a NUL" in content, content
    for harmless in (r"\ud83d\ude00", r"\\u0000", r"\\\\u0000"):
        body = f'{{"configuration": "{harmless}"}}'.encode()
        status, content = served.ask("/api/searches/check", body)
        assert status == 404 and b"no configuration" in content, content

    for path in ("/searches/a%00b", "/api/pareto?task=%00"):
        assert served.ask(path)[0] == 404


def test_json_that_readers_may_understand_differently_is_refused(served: Served) -> None:
    twice = b'{"configuration": "small", "overrides": {"genome.kind": "eep", "genome.kind": "tomoe"}}'
    status, content = served.ask("/api/searches/check", twice)
    assert status == 422 and b"gives 'genome.kind' twice" in content, content
    status, content = served.ask("/api/searches/lab/scale", b'{"workers": true}')
    assert status == 422 and b"`workers` is a number, not true" in content, content


@pytest.mark.parametrize("path", ["/login", "/static/style.css", "/api/searches/lab/pause"])
def test_a_length_in_two_ways_is_refused(served: Served, path: str) -> None:
    smuggled = "GET /metrics HTTP/1.1\r\nhost: localhost\r\n\r\n"
    for framing in (
        "content-length: 5\r\ntransfer-encoding: chunked",
        "transfer-encoding: chunked\r\ncontent-length: 99",
    ):
        head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\n{WRITER}{framing}\r\n\r\n"
        answer = served.send(f"{head}0\r\n\r\n{smuggled}")
        assert answer.startswith(b"HTTP/1.1 400 ") and answer.count(b"HTTP/1.1") == 1, "and nothing after it is served"


def test_every_page_and_file_answers_head(served: Served) -> None:
    paths = ("/", "/login", "/best", "/searches/lab", "/static/style.css", "/healthz", "/metrics", "/api/searches")
    for path in (*paths, "/api/news", "/api/searches/lab/course"):
        status, content = served.ask(path, method="HEAD")
        assert (status, content) == (200, b""), path
    assert served.ask("/nothing", method="HEAD") == (404, b"")
    assert served.ask("/api/searches", method="HEAD", headers="") == (401, b""), "and no more than GET without a token"


def test_an_international_host_name_is_known_as_browsers_send_it(served: Served) -> None:
    for host, status in {
        b"XN--BCHER-KVA.EXAMPLE:8080": 401,
        b"xn--strae-oqa.example": 401,
        b"strasse.example": 400,
        b"xn--evil.example": 400,
    }.items():
        answer = served.send(b"GET /api/searches HTTP/1.1\r\nconnection: close\r\nhost: " + host + b"\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 %d " % status), answer


STYLE = b"GET /static/style.css HTTP/1.1\r\nhost: localhost\r\n\r\n"
HTMX = STYLE.replace(b"style.css", b"vendor/htmx.min.js")
"""Answers of 50 kB, of which 200 are twice what a system keeps for a client that doesn't read."""


def test_who_asks_and_never_reads_is_not_kept(served: Served) -> None:
    def all_are_gone() -> bool:
        assert served.ask("/healthz")[0] == 200, "others are served meanwhile"
        return not served.connections

    with ExitStack() as deaf:
        for _ in range(3):
            deaf.enter_context(served.connect(receive_buffer=4096)).sendall(HTMX * 200)
        until(all_are_gone)


def test_who_reads_slowly_gets_everything_and_a_connection_ends(served: Served) -> None:
    length = len(served.send(STYLE.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n")))
    with served.connect(receive_buffer=4096) as slow:
        slow.sendall(STYLE * 60)
        begun, taken = time.monotonic(), 0
        while time.monotonic() < begun + 2 * ImpatientProtocol.send_timeout_s or taken < 20 * length:
            piece = slow.recv(1 << 17)
            assert piece, "closed before its time"
            taken += len(piece)
            time.sleep(0.02)
    answers = served.send(b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n" * (ImpatientProtocol.max_requests + 9))
    assert answers.count(b"HTTP/1.1 200 OK") == ImpatientProtocol.max_requests
    assert answers.count(b"connection: close") == 1, "clients are told, so that they connect again"


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        *(("phases.0.evaluations", "1" + 18 * "0"), ("seed", 4000 * "9"), ("workers.count", "1000000000")),
        *(("workers.timeout_s", '"inf"'), ("final.rerank", "1e18"), ("window", "1e18")),
    ],
)
def test_a_number_beyond_all_use_is_refused_where_it_is_set(served: Served, setting: str, value: str) -> None:
    body = f'{{"configuration": "small", "overrides": {{"{setting}": {value}}}}}'.encode()
    for path in ("/api/searches/check", "/api/searches"):
        status, content = served.ask(path, body)
        assert status == 422 and setting.rsplit(".", maxsplit=1)[-1].encode() in content, content


NASTY = "a</text><script>alert('x')</script> $\\frac{$ & \"b"
"""Markup, and what matplotlib would take for a formula that doesn't end."""


def test_hostile_text_in_a_figure_is_text(served: Served) -> None:
    """No name of a launch is like that, but a store may come from elsewhere."""
    setup = start(served.store, run_config(name="nasty"), "nasty-1")
    drive(served.store, setup, UnrulyPool(seed=1))
    with transaction(make_engine(served.store.url, create=False), write=True) as connection:
        connection.execute(update(searches).where(searches.c.id == "nasty-1").values(name=NASTY))
        connection.execute(update(individuals).where(individuals.c.search_id == "nasty-1").values(phase=NASTY))
    status, content = served.ask("/individuals/nasty-1:40/genome.svg")
    assert status == 200, content
    found = [each.tag.rpartition("}")[2] for each in ET.fromstring(content).iter()]
    assert "svg" in found and "script" not in found


def test_a_store_that_is_deleted_while_it_is_used_ends_what_uses_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file, said = tmp_path / "lab.db", "lab.db: the store was deleted or replaced while this process had it open"

    with Store.open(f"sqlite:///{file}") as store, Store.open(store.url) as served:
        client = TestClient(make_app(served, ServerSettings(store=store.url, logs=tmp_path)), "http://localhost")
        assert client.get("/api/searches").json() == []
        setup = start(store, run_config())
        file.unlink()
        with pytest.raises(StoreError, match=said):
            drive(store, setup, UnrulyPool(seed=1))
        for path in ("/api/searches", "/", "/healthz"):
            assert client.get(path).status_code == 503
    assert said in caplog.text and not file.exists(), "and no empty store was made in its place"
