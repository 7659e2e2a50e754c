"""Shrinks over HTTP and on pages: uploaded files, refusals, and once all the way to a checkpoint."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import pytest
import store_samples as samples
from demo_chats import write_chats
from page_checks import Page, check, page_of
from safetensors import safe_open
from search_lab import run_config
from served_here import in_thread, served_here
from server_tokens import READ, WRITE
from shrink_samples import put, shrink_record, stages_of
from starlette.testclient import TestClient
from waiting import PATIENT_S, until

from moevolve.search.results.kept import Kept
from moevolve.search.server.app import make_app
from moevolve.search.server.connections import BoundedProtocol
from moevolve.search.server.settings import ServerSettings
from moevolve.search.server.uploads import plain_name
from moevolve.search.shrink.record import STAGES, SizeTrial
from moevolve.store.leases import this_process
from moevolve.store.repository import Store
from moevolve.workers.children.process import ChildProcess

DEMO = Path(__file__).parents[3] / "configs" / "demo" / "model"
EXPERTS = json.loads((DEMO / "config.json").read_text())["num_local_experts"]
HEADERS = {"authorization": f"Bearer {WRITE}", "x-moevolve": "1", "accept": "text/html"}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    with Store.open(f"sqlite:///{tmp_path_factory.mktemp('store') / 'lab.db'}") as opened:
        yield opened


@pytest.fixture
def settings(store: Store, tmp_path: Path) -> ServerSettings:
    """Settings with all that a shrink may name, and a folder for uploads."""
    tokens = tmp_path / "tokens"
    tokens.write_text(f"read {READ}\nwrite {WRITE}\n")
    tokens.chmod(0o600)
    return ServerSettings(
        store=store.url,
        tokens=tokens,
        models={"tiny": str(DEMO), "gone": "/nowhere/model"},
        data={"named": "/data/named.jsonl"},
        uploads=tmp_path / "uploads",
        upload_mb=1,
        exports=tmp_path / "exports",
        logs=tmp_path / "logs",
    )


@pytest.fixture
def client(store: Store, settings: ServerSettings, monkeypatch: pytest.MonkeyPatch) -> TestClient:
    """A client with a write token of a server that checks requests and files in this process."""
    monkeypatch.setattr(ChildProcess, "call", lambda _, function, *arguments: function(*arguments))
    return TestClient(make_app(store, settings), "http://localhost:8080", headers=HEADERS)


@pytest.fixture
def chats(tmp_path: Path) -> bytes:
    write_chats(tmp_path / "chats.jsonl", 100)
    return (tmp_path / "chats.jsonl").read_bytes()


def kept(settings: ServerSettings) -> list[str]:
    """Names in the folder for uploads, hidden ones too."""
    assert settings.uploads is not None
    return sorted(path.name for path in settings.uploads.iterdir()) if settings.uploads.is_dir() else []


def listed(client: TestClient) -> list[str]:
    """Names of the files that a shrink may use."""
    return [file["name"] for file in client.get("/api/data").json()]


ASKED = {"name": "small", "model": "tiny", "data": ["named"], "experts": "50%"}
PLAIN = ["--experts", "50%", "--data", "/data/named.jsonl"]


def test_a_checkpoint_is_shrunk_for_what_the_server_knows_by_name(
    client: TestClient, settings: ServerSettings, started: list[list[str]], store: Store
) -> None:
    more = {"tasks": ["boolq"], "guard_time": "2m", "force": True, "seed": 0}
    for changes in ({}, more):
        answer = client.post("/api/shrinks", json=ASKED | changes)
        assert answer.status_code == 202 and answer.json()["command"] == "shrink", answer.text
    output, last = ["--output", f"{settings.exports}/small"], ["--"]
    assert started == [
        ["shrink", *PLAIN, *output, *last, str(DEMO)],
        [
            *("shrink", *PLAIN, "--task", "boolq", *output),
            *("--guard-time", "2m", "--force", *last, str(DEMO)),
        ],
    ]
    bare = TestClient(make_app(store, ServerSettings(store=store.url)), "http://localhost", headers=HEADERS)
    answer = bare.post("/api/shrinks", json=ASKED)
    assert answer.status_code == 422 and "see `exports` in its settings" in answer.text
    assert "exports: exports" in page_of(bare, "/shrink").text
    assert bare.put("/api/data/chats.jsonl", content=b"{}").json()["detail"].startswith("this server takes no files")


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"model": "/models/tiny"}, "model: the server knows no '/models/tiny'"),
    ({"data": ["/etc/passwd"]}, "data: the server knows no"),
    ({"data": ["../tokens"]}, "data: the server knows no"),
    ({"tasks": ["../secret.yaml"]}, "tasks: the server knows no"),
    ({"data": []}, "data or tasks"),
    ({"output": "/tmp/elsewhere"}, "output: Extra inputs are not permitted"),
    ({"metric": "evil.py:run"}, "metric: Extra inputs are not permitted"),
    ({"overrides": ["model.path=/etc"]}, "overrides: Extra inputs are not permitted"),
    ({"store": "sqlite:////tmp/other.db"}, "store: Extra inputs are not permitted"),
    ({"name": "../up"}, "name: String should match pattern"),
    ({"experts": None}, "give one of --experts"),
    ({"size": "1GiB"}, "give one of --experts"),
    ({"experts": "0%"}, "--experts 0%: give a number such as 8, or a share"),
    ({"experts": "40"}, "--experts 40: did you mean 40%?"),
    ({"model": "gone"}, "model /nowhere/model: no such directory"),
    ({"time": "2h", "evaluations": 9}, "--time and --evaluations both set the number of candidates"),
    ({"guard_time": "soon"}, "--guard-time soon"),
]


def test_wrong_requests_are_refused_with_the_commands_own_words(client: TestClient, started: list[list[str]]) -> None:
    for changes, said in WRONG:
        answer = client.post("/api/shrinks", json=ASKED | changes)
        assert answer.status_code == 422 and said in answer.json()["detail"], answer.text
    assert not started


def test_a_file_is_uploaded_once_under_a_plain_name(
    client: TestClient, settings: ServerSettings, started: list[list[str]], chats: bytes
) -> None:
    for _ in range(2):
        answer = client.put("/api/data/my%20chats%20(1).jsonl", content=chats)
        made = {"name": "my-chats-1-.jsonl", "bytes": len(chats), "rows": 100}
        assert (answer.status_code, answer.json()) == (201, made), answer.text
    other = client.put("/api/data/my-chats-1-.jsonl", content=chats + chats.splitlines(keepends=True)[0])
    assert other.status_code == 409 and "has a file my-chats-1-.jsonl with other content" in other.text
    text = client.put("/api/data/book.txt", content="\n\n".join(f"{n} {'word ' * 90}" for n in range(80)).encode())
    assert (text.json()["name"], text.json()["rows"]) == ("book.txt", 80)
    assert kept(settings) == ["book.txt", "my-chats-1-.jsonl"]
    assert listed(client) == ["book.txt", "my-chats-1-.jsonl", "named"]
    assert [file["bytes"] for file in client.get("/api/data").json()] == [len(text.request.content), len(chats), None]
    assert client.post("/api/shrinks", json=ASKED | {"data": ["book.txt", "named"]}).status_code == 202
    assert started[0][3:7] == ["--data", f"{settings.uploads}/book.txt", "--data", "/data/named.jsonl"]


def test_columns_are_told_with_the_file(client: TestClient, settings: ServerSettings) -> None:
    rows = "ask,reply\n" + "".join(f"what is {n}?,{n}\n" for n in range(100))
    refused = client.put("/api/data/table.csv", content=rows)
    assert refused.status_code == 422 and not kept(settings)
    answer = client.put("/api/data/table.csv?columns=prompt%3Dask,answer%3Dreply", content=rows)
    assert (answer.status_code, answer.json()["rows"]) == (201, 100), answer.text
    wrong = client.put("/api/data/other.csv?columns=ask", content=rows)
    assert wrong.status_code == 422 and "--columns ask: give NAME=COLUMN" in wrong.text


def test_a_small_file_does_not_wait_for_the_check_of_a_large_one(
    store: Store, settings: ServerSettings, chats: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, end = threading.Event(), threading.Event()

    def check(_: ChildProcess, function: Any, path: Path, columns: str | None) -> Any:
        if path.stat().st_size > 1 << 20:
            begun.set()
            end.wait(PATIENT_S)
        return function(path, columns)

    monkeypatch.setattr(ChildProcess, "call", check)
    served = settings.model_copy(update={"upload_mb": 2})
    large = chats * ((1 << 20) // len(chats) + 1)
    app = make_app(store, served)
    with TestClient(app, "http://localhost:8080", headers=HEADERS) as client, ThreadPoolExecutor(1) as thread:
        waits = thread.submit(client.put, "/api/data/large.jsonl", content=large)
        assert begun.wait(PATIENT_S)
        assert client.put("/api/data/small.jsonl", content=chats).status_code == 201
        end.set()
        assert waits.result().status_code == 201


def test_clients_together_upload_so_many_files_and_no_more(
    client: TestClient, settings: ServerSettings, chats: bytes
) -> None:
    assert settings.uploads is not None
    settings.uploads.mkdir()
    for number in range(99):
        (settings.uploads / f"{number}.jsonl").write_bytes(chats)
    assert client.put("/api/data/last.jsonl", content=chats).status_code == 201
    answer = client.put("/api/data/further.jsonl", content=chats)
    assert answer.status_code == 422 and "has as many; delete one first" in answer.text
    assert client.put("/api/data/last.jsonl", content=chats).status_code == 201, "it is there already"
    assert client.delete("/api/data/7.jsonl", headers=HEADERS).status_code == 200
    assert client.put("/api/data/further.jsonl", content=chats).status_code == 201


ROWS = "".join(json.dumps({"prompt": f"what is {n}?", "answer": str(n)}) + "\n" for n in range(100))
REFUSED: list[tuple[str, str | bytes, int, str]] = [
    ("few.jsonl", "".join(ROWS.splitlines(keepends=True)[:9]), 422, "--data few.jsonl: 9 rows with different first"),
    (
        *("bad.jsonl", ROWS + '{"prompt": 1}\nno\n[]\n{"prompt": ""}\n', 422),
        "bad.jsonl: 4 of 104 rows can't be used: bad.jsonl:101: prompt: Input should be a valid string",
    ),
    ("bad.json", "[" * 100_000, 422, "bad.json: its brackets are nested too deeply"),
    ("binary.csv", b"\xff\xfe\x00" * 99, 422, "binary.csv:1: not UTF-8 text"),
    ("empty.jsonl", "", 422, "empty.jsonl: the file is empty"),
    ("code.py", ROWS, 422, "must end in one of .jsonl"),
    ("model.safetensors", ROWS, 422, "must end in one of .jsonl"),
    ("data.parquet", ROWS, 422, "must end in one of .jsonl"),
    ("none", ROWS, 422, "must end in one of .jsonl"),
    (".jsonl", ROWS, 422, "must end in one of .jsonl"),
    ("..", ROWS, 404, ""),
    ("%2e%2e%2fup.jsonl", ROWS, 404, ""),
    ("%2Fetc%2Fup.jsonl", ROWS, 404, ""),
    ("nul%00.jsonl", ROWS, 404, ""),
    ("x" * 95 + ".jsonl", ROWS, 422, "name: String should have at most 100 characters"),
    ("huge.jsonl", b" " * (10**6 + 1), 413, "a request's body may have 1,000,000 bytes here"),
    ("named", ROWS, 422, "must end in one of .jsonl"),
]


def test_what_no_shrink_could_read_is_refused_and_not_kept(client: TestClient, settings: ServerSettings) -> None:
    for name, content, status, said in REFUSED:
        answer = client.put(f"/api/data/{name}", content=content)
        assert answer.status_code == status and (status == 404 or said in answer.json()["detail"]), (name, answer.text)
        assert kept(settings) == [], name
        assert str(settings.uploads) not in answer.text
    streamed = client.put("/api/data/huge.jsonl", content=iter([b" " * 10**5] * 11))
    assert streamed.status_code == 413 and "1,000,000 bytes" in streamed.text and kept(settings) == []
    assert client.put("/api/data/ok.jsonl", content=ROWS.encode(), headers={"x-moevolve": ""}).status_code == 422
    read = {"authorization": f"Bearer {READ}"}
    assert client.put("/api/data/ok.jsonl", content=ROWS, headers=read).status_code == 403
    foreign = {"origin": "http://evil.example"}
    assert client.put("/api/data/ok.jsonl", content=ROWS, headers=foreign).status_code == 403
    assert kept(settings) == []
    assert client.post("/api/shrinks", content=b" " * 70_000).status_code == 413, "other bodies are as small as ever"


def test_names_lead_nowhere_but_into_the_folder(client: TestClient, settings: ServerSettings, tmp_path: Path) -> None:
    for given, name in {
        "a/../../b.jsonl": "a-..-..-b.jsonl",
        "..\\..\\b.csv": "b.csv",
        "/etc/b.TXT": "etc-b.TXT",
        "é b\0.md": "b-.md",
    }.items():
        assert plain_name(given) == name
    assert settings.uploads is not None
    settings.uploads.mkdir()
    (tmp_path / "secret.jsonl").write_text("secret")
    (settings.uploads / "link.jsonl").symlink_to(tmp_path / "secret.jsonl")
    (settings.uploads / "dangling.jsonl").symlink_to(tmp_path / "new.jsonl")
    assert listed(client) == ["named"]
    for name in ("link.jsonl", "dangling.jsonl"):
        answer = client.put(f"/api/data/{name}", content=ROWS)
        assert answer.status_code == 409 and "choose another name" in answer.text, answer.text
    assert (tmp_path / "secret.jsonl").read_text() == "secret" and not (tmp_path / "new.jsonl").exists()


def test_only_uploaded_files_that_no_running_shrink_uses_are_deleted(
    client: TestClient, settings: ServerSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "secret.jsonl").touch()
    assert settings.uploads is not None
    settings.uploads.mkdir()
    (settings.uploads / "link.jsonl").symlink_to(tmp_path / "secret.jsonl")
    for name in ("one.jsonl", "two.jsonl"):
        assert client.put(f"/api/data/{name}", content=ROWS).status_code == 201
    page = page_of(client, "/shrink")
    assert [found["hx-delete"] for found in page.all("button") if "hx-delete" in found] == [
        "/api/data/one.jsonl",
        "/api/data/two.jsonl",
    ]
    assert "5 kB" in page.text
    for name in ("named", "none.jsonl", "link.jsonl", "..", "%2e%2e%2fsecret.jsonl", "..%5Csecret.jsonl", "tokens"):
        assert client.delete(f"/api/data/{name}").status_code == 404, name
    read = TestClient(client.app, "http://localhost", headers={"authorization": f"Bearer {READ}", "x-moevolve": "1"})
    assert read.delete("/api/data/one.jsonl").status_code == 403
    script = tmp_path / "waits"
    script.write_text("#!/bin/sh\nexec sleep 600\n")
    script.chmod(0o700)
    monkeypatch.setattr("sys.executable", str(script))
    assert client.post("/api/shrinks", json=ASKED | {"data": ["one.jsonl"]}).status_code == 202
    refused = client.delete("/api/data/one.jsonl")
    assert refused.status_code == 409 and "one.jsonl is in use by the shrink small; stop it" in refused.text
    assert client.delete("/api/data/two.jsonl").status_code == 200
    assert client.post("/api/searches/small/stop").status_code == 200
    until(lambda: client.delete("/api/data/one.jsonl").status_code == 200)
    assert listed(client) == ["named"] and kept(settings) == ["link.jsonl"]
    assert (tmp_path / "secret.jsonl").exists()


class ImpatientProtocol(BoundedProtocol):
    """Connections that wait less long for requests."""

    request_timeout_s = 0.5


def test_an_upload_may_take_its_time_but_not_stand_still(
    store: Store, settings: ServerSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ChildProcess, "call", lambda _, function, *arguments: function(*arguments))
    head = f"PUT /api/data/slow.jsonl HTTP/1.1\r\nhost: localhost\r\nx-moevolve: 1\r\ncontent-length: {len(ROWS)}\r\n"
    size = -(-len(ROWS) // 8)
    with in_thread(make_app(store, settings), http=ImpatientProtocol, ws="none") as (port, _):

        def answered(token: str, pieces: Sequence[str]) -> bytes:
            """The answer to a slow upload."""
            with socket.create_connection(("127.0.0.1", port), PATIENT_S) as opened:
                opened.sendall(f"{head}authorization: Bearer {token}\r\nconnection: close\r\n\r\n".encode())
                for piece in pieces:
                    opened.sendall(piece.encode())
                    time.sleep(0.2)
                return b"".join(iter(lambda: opened.recv(1 << 16), b""))

        pieces = [ROWS[place : place + size] for place in range(0, len(ROWS), size)]
        assert b'"rows":100' in answered(WRITE, pieces)
        assert answered(WRITE, pieces[:4]) == b""
        until(lambda: kept(settings) == ["slow.jsonl"])
        with pytest.raises(ConnectionError):
            answered("wrong", ROWS[:50])


FORM = {"name": "small", "model": "tiny", "data": "named", "keep": "experts", "amount": " 25% "}


def test_the_form_starts_what_the_api_does(client: TestClient, started: list[list[str]]) -> None:
    page = page_of(client, "/shrink")
    names = {found["name"] for found in page.all("input", "select")}
    assert {"name", "model", "data", "tasks", "keep", "amount", "repair", "time", "custom_code", "guard_time"} < names
    assert not {"metric", "output", "store", "overrides", "dry_run"} & names
    assert page.texts_of("option")[:2] == ["gone", "tiny"] and "such as 50% of the experts" in page.text
    assert [found["value"] for found in page.all("input") if found["name"] == "data"] == ["named"]
    typed = FORM | {"custom_code": "on", "repair": "none", "time": "2h", "seed": ""}
    answer = client.post("/shrink?part=1", json=typed | {"tasks": ["boolq", "rte"], "guard_time": "7m"})
    assert answer.status_code == 200 and answer.headers["hx-redirect"] == "/shrinks/small"
    command = started[0][:-2]
    for words in (["--experts", "25%"], ["--repair", "none"], ["--time", "2h"], ["--guard-time", "7m"]):
        assert command[command.index(words[0]) + 1] == words[1]
    assert "--custom-code" in command and command.count("--task") == 2
    for changes, said in (
        ({"amount": "0%"}, "--experts 0%: give a number"),
        ({"metric": "evil.py:run"}, "metric: Extra inputs"),
        ({"evaluations": "many"}, "evaluations: Input should be a valid integer"),
        ({"name": "../up"}, "name: String should match"),
        ({"keep": "all"}, "keep: Input should be"),
        ({"time": 7}, "time: Input should be a valid string"),
        ({"guard_time": ["7m", "9m"]}, "guard_time: Input should be a valid string"),
        ({"seed": None}, "seed: Input should be a valid string"),
    ):
        answer = client.post("/shrink?part=1", json=FORM | changes)
        assert answer.status_code == 422 and said in check(answer.text, whole=False).text, answer.text
    assert len(started) == 1
    headers = {"accept": "text/html", "authorization": f"Bearer {READ}"}
    reader = page_of(TestClient(client.app, "http://localhost", headers=headers), "/shrink")
    assert "needs a token of scope write" in reader.text
    assert all("disabled" in found for found in reader.all("button", "fieldset", "select"))


def test_a_shrinks_page_shows_its_record_whatever_its_log_says(
    client: TestClient, store: Store, settings: ServerSettings, tmp_path: Path
) -> None:
    """Every message of the command is another one in the second log, and the page stays the same."""
    settings.logs.mkdir()
    later = TestClient(make_app(store, settings), "http://localhost:8080", headers=HEADERS)
    for stage, record in stages_of(tmp_path).items():
        put(store, record)
        shown = []
        for log in ("shrink: searching\nwrote small\nthe search is small-6 in sqlite:///lab.db\n", "qwertz\n" * 30):
            (settings.logs / "small.log").write_text(log)
            shown += [server.get("/shrinks/small").text for server in (client, later)]
        assert len(set(shown)) == 1, "after a restart of the server, too"
        page = page_of(client, "/shrinks/small")
        polls = [found for found in page.all("div") if "every" in found.get("hx-trigger", "")]
        assert len(polls) == (record.status == "running"), stage
        if record.status == "running":
            assert STAGES[record.stage] in page.text
        assert (record.failure or record.amount) in page.text and record.status in page.text
        for trial in record.sizes:
            assert f"{trial.size} one-shot choices 60.0 %" in page.text
        assert client.get("/api/shrinks/small").json()["stage"] == record.stage
        assert client.get("/searches/small", follow_redirects=False).headers["location"] == "/shrinks/small"
    assert [found["name"] for found in client.get("/api/shrinks").json()] == ["small"]
    for path in ("/shrinks/smal", "/api/shrinks/smal", "/searches/smal"):
        assert client.get(path).status_code == 404


def test_the_sizes_that_were_tried_are_on_the_pages_of_their_searches(
    client: TestClient, store: Store, tmp_path: Path
) -> None:
    for name in ("least-4", "least-6"):
        store.create_search(samples.search(name, config=run_config().canonical_json()), [samples.split()])
    kept = Kept(0.6, 0.4, 0.8)
    trials = (SizeTrial(4, "least-4", False, kept, False), SizeTrial(6, "least-6", True, kept, True))
    put(store, shrink_record(tmp_path, "least", unit="of 8 experts", sizes=trials, stage="checks"))
    for name in ("least-4", "least-6"):
        page = page_of(client, f"/searches/{name}")
        assert "Sizes tried, of 8 experts" in page.text and "/searches/least-4" in page.links


def test_a_shrink_that_was_stopped_is_resumed_as_a_whole_by_any_server(
    client: TestClient, store: Store, settings: ServerSettings, started: list[list[str]], tmp_path: Path
) -> None:
    for name, folder in (("stopped", settings.exports), ("foreign", tmp_path)):
        assert folder is not None
        store.create_search(samples.search(name), [samples.split()])
        put(store, shrink_record(folder, name, search=name, status="interrupted"))
    later = TestClient(make_app(store, settings), "http://localhost:8080", headers=HEADERS)
    for server in (client, later):
        answer = server.post("/api/searches/stopped/resume", json={})
        assert answer.status_code == 202 and answer.json()["command"] == "shrink", answer.text
    last = ["--output", f"{settings.exports}/stopped", "--", "/models/tiny"]
    assert started == [["shrink", *PLAIN, *last]] * 2
    answer = client.post("/api/searches/foreign/resume", json={})
    assert answer.json()["command"] == "resume", "the folder isn't this server's"


def test_a_shrink_whose_process_was_killed_is_resumed_from_its_page(
    client: TestClient, store: Store, settings: ServerSettings, started: list[list[str]]
) -> None:
    assert settings.exports is not None
    with subprocess.Popen(["true"]) as ended:
        ended.wait()
    mine, gone = this_process(), this_process().replace(str(os.getpid()), str(ended.pid))
    put(store, shrink_record(settings.exports, "killed", stage="look", owner=gone))
    page = page_of(client, "/shrinks/killed")
    assert "failed while asking the full model: its process is gone; it can be resumed" in page.text
    assert [found["hx-post"] for found in page.all("button")][-1] == "/api/shrinks/killed/resume"
    refused = client.post("/api/shrinks/killed/stop", json={})
    assert refused.status_code == 409 and refused.json()["detail"] == "shrink killed: it is failed"
    assert client.post("/api/shrinks/killed/resume", json={}).status_code == 202
    assert started == [["shrink", *PLAIN, "--output", f"{settings.exports}/killed", "--", "/models/tiny"]]
    put(store, shrink_record(settings.exports, "killed", stage="look", owner=mine))
    page = page_of(client, "/shrinks/killed")
    assert [found["hx-post"] for found in page.all("button")][-1] == "/api/shrinks/killed/stop"
    refused = client.post("/api/shrinks/killed/stop", json={})
    assert refused.status_code == 409 and "this server hasn't started its process" in refused.json()["detail"]
    refused = client.post("/api/shrinks/killed/resume", json={})
    assert refused.status_code == 409 and refused.json()["detail"] == "shrink killed is running already"
    put(store, shrink_record(settings.exports.parent, "far", status="interrupted"))
    assert "resume it where it began" in client.post("/api/shrinks/far/resume", json={}).json()["detail"]


@pytest.mark.slow
def test_from_an_uploaded_file_to_a_checkpoint(tmp_path: Path, chats: bytes) -> None:
    """Over HTTP alone, with a shrink in a process of its own."""
    settings = ServerSettings(
        store=f"sqlite:///{tmp_path / 'lab.db'}",
        models={"demo": str(DEMO)},
        uploads=tmp_path / "uploads",
        exports=tmp_path / "exports",
        logs=tmp_path / "logs",
    )
    with (
        served_here(settings, "resident_pool") as url,
        httpx2.Client(base_url=url, headers={"x-moevolve": "1", "accept": "text/html"}, timeout=PATIENT_S) as browser,
    ):

        def shown(path: str) -> Page:
            answer = browser.get(path)
            assert answer.status_code == 200, answer.text
            return check(answer.text, whole="part=1" not in path)

        assert browser.put("/api/data/chats.jsonl", content=chats).json()["rows"] == 100
        assert [found["value"] for found in shown("/shrink").all("input") if found["name"] == "data"] == ["chats.jsonl"]
        typed = {"name": "small", "model": "demo", "data": "chats.jsonl", "keep": "experts", "amount": "50%"}
        limits = {"repair": "none", "evaluations": "4", "guard_time": "5s", "force": "on"}
        answer = browser.post("/shrink?part=1", json=typed | limits)
        assert answer.status_code == 200, answer.text
        assert answer.headers["hx-redirect"] == "/shrinks/small"
        state = "/shrinks/small?part=1"
        until(lambda: "finished" in shown(state).text, why=lambda: shown(state).text)
        page = shown("/searches/small")
        folder = tmp_path / "exports" / "small"
        assert f"{folder} stock transformers, " in page.text
        assert f"wrote {folder} (stock checkpoint of small:" in shown(state).text
        record = browser.get("/api/shrinks/small").json()
        assert record["status"] == "finished" and record["written"]["directory"] == str(folder)
    router = "model.layers.0.block_sparse_moe.gate.weight"
    with safe_open(folder / "model.safetensors", "np") as weights:
        assert weights.get_slice(router).get_shape()[0] == EXPERTS // 2
