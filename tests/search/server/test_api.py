"""The API returns what the store holds."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from itertools import islice
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter
from search_samples import few
from starlette.responses import Response
from starlette.testclient import TestClient
from waiting import PATIENT_S

from moevolve.search.server.caches import down_sampled
from moevolve.search.server.pages import individuals
from moevolve.search.server.queues import MOST
from moevolve.store.costs import SearchCosts
from moevolve.store.errors import UnreachableError
from moevolve.store.records import Event
from moevolve.store.repository import Store

READS: dict[str, tuple[Any, Callable[[Store], Any]]] = {
    "/api/searches/lab/costs": (SearchCosts, lambda store: store.costs(store.search("lab"))),
    "/api/searches/lab-1/events?after=2": (list[Event], lambda store: store.events({"lab-1": 2})),
    "/api/events?limit=3": (list[Event], lambda store: store.latest_events(limit=3)),
}
"""What no request of `test_same_over_http.py` asks for."""


def test_records_arrive_as_they_are(client: TestClient, lab_store: Store) -> None:
    for path, (kind, there) in READS.items():
        answer = client.get(path)
        assert answer.status_code == 200, answer.text
        assert TypeAdapter(kind).validate_json(answer.content) == there(lab_store) != [], path


def test_pages_of_individuals_make_the_whole(client: TestClient, lab_store: Store) -> None:
    history = lab_store.history("lab-1")
    ok = [one for one in history if one.status == "ok"]
    expected = {
        "best": sorted(ok, key=lambda one: (-one.fitness, -one.tie_break, one.index)),
        "newest": history[::-1],
        "failed": [one for one in history[::-1] if one.status == "failed"],
    }
    for order, rows in expected.items():
        found: list[dict[str, Any]] = []
        while True:
            after = f"&after={found[-1]['index']}" if found else ""
            page = client.get(f"/api/searches/lab/individuals?order={order}&limit=25{after}").json()
            found += page
            if len(page) < 25:
                break
        assert [row["index"] for row in found] == [one.index for one in rows], order
        assert all("genome" not in row for row in found)


WRONG = [
    ("/api/searches/labb", 404, "no search 'labb': did you mean lab?"),
    ("/api/individuals/lab:60", 404, "no individual 'lab:60'; nearest: lab:59"),
    ("/api/individuals/lab:\N{ARABIC-INDIC DIGIT THREE}", 404, "names no individual"),
    ("/api/individuals/lab:99999999999999999999", 404, "names no individual"),
    ("/api/searches/lab/individuals?after=99", 404, "no individual 99"),
    ("/api/best?task=two", 404, "no task 'two'"),
    ("/api/best?limit=0", 422, "limit: "),
    ("/api/pareto", 422, "task"),
    ("/api/nothing", 404, ""),
]


def test_errors_are_one_line(client: TestClient) -> None:
    for path, status, detail in WRONG:
        answer = client.get(path)
        assert answer.status_code == status and detail in answer.json()["detail"], path
        assert list(answer.json()) == ["detail"]


def test_details_of_failures_are_only_in_the_log(
    client: TestClient, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def away(*_: object) -> None:
        raise UnreachableError("postgresql://me@inside.example/lab: connection refused")

    def broken(*_: object) -> None:
        raise RuntimeError("secret of the inside.example")

    monkeypatch.setattr(Store, "search", away)
    for path, accept in {"/api/searches/lab": "*/*", "/searches/lab": "text/html"}.items():
        answer = client.get(path, headers={"accept": accept})
        assert answer.status_code == 503 and "be read now; the server" in answer.text
        assert "inside" not in answer.text
    assert caplog.text.count("inside.example") == 2
    monkeypatch.setattr(Store, "search", broken)
    quiet = TestClient(client.app, "http://localhost", headers=client.headers, raise_server_exceptions=False)
    answer = quiet.get("/api/searches/lab")
    assert answer.status_code == 500 and answer.json() == {"detail": "the server failed; its log says how"}


def test_a_search_is_controlled(client: TestClient, lab_store: Store) -> None:
    assert "isn't being run" in client.post("/api/searches/lab/stop").json()["detail"]
    lease = lab_store.acquire("lab-1", "driver", 60)
    for verb, wanted in {"pause": "paused", "stop": "stopped", "cancel": "cancelled"}.items():
        answer = client.post(f"/api/searches/lab/{verb}")
        assert (answer.status_code, answer.json()["desired_state"]) == (200, wanted)
        assert lab_store.renew(lease, 60).desired_state == wanted
    assert client.post("/api/searches/lab/scale", json={"workers": 5}).json()["workers"] == 5
    for body in ({"workers": 0}, {"workers": 2, "who": "x"}, {}):
        assert client.post("/api/searches/lab/scale", json=body).status_code == 422
    by = "by the write token of line 4"
    assert [event.text for event in lab_store.latest_events("lab-1", 4)][::-1] == [
        *(f"to be {wanted}, {by}" for wanted in ("paused", "stopped", "cancelled")),
        f"workers: 5, {by}",
    ]


fitnesses = st.lists(st.one_of(st.just(float("nan")), st.floats(0, 1)), max_size=60)


@few
@given(fitnesses, st.integers(1, 20))
def test_down_sampling_keeps_extremes(values: list[float], points: int) -> None:
    course = down_sampled(np.array(values, dtype=np.float64), points)
    known = [(index, value) for index, value in enumerate(values) if value == value]
    assert len(course.first) <= points
    buckets: dict[int, list[tuple[int, float]]] = {}
    for index, value in known:
        buckets.setdefault(index // course.width, []).append((index, value))
    assert list(course.first) == [members[0][0] for members in buckets.values()]
    assert list(course.low) == [min(value for _, value in members) for members in buckets.values()]
    tops = [max(members, key=lambda each: (each[1], -each[0])) for members in buckets.values()]
    assert list(zip(course.at, course.high, strict=True)) == tops
    assert list(course.best) == [
        max(value for _, value in known if _ <= last) for last in (members[-1][0] for members in buckets.values())
    ]


def test_a_curve_has_every_fitness(client: TestClient, lab_store: Store) -> None:
    course = client.get("/api/searches/lab/course").json()
    expected = [(one.index, one.fitness) for one in lab_store.history("lab-1") if one.status == "ok"]
    assert list(zip(course["at"], course["high"], strict=True)) == expected and len(expected) > 40


def test_waiting_drawings_do_not_block_other_requests(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    may_end, at_once, most = threading.Event(), 0, 0

    def draw(*_: Any) -> Response:
        nonlocal at_once, most
        at_once += 1
        most = max(most, at_once)
        may_end.wait(PATIENT_S)
        at_once -= 1
        return Response(b"a picture")

    monkeypatch.setattr(individuals, "svg_document", draw)
    refused = 45 - MOST  # with those that wait more than all threads for answers
    with ThreadPoolExecutor(45) as browsers:
        asked = [browsers.submit(client.get, "/individuals/lab:50/genome.svg") for _ in range(45)]
        try:
            early = [each.result() for each in islice(as_completed(asked, timeout=PATIENT_S), refused)]
            assert client.get("/healthz").text == "ok\n"
            assert client.get("/api/searches/lab").status_code == 200
        finally:
            may_end.set()
        answers = [each.result() for each in asked]
    assert all(answer.status_code == 503 and "drawings are waited for" in answer.text for answer in early)
    assert early[0].headers["retry-after"].isdecimal()
    assert Counter(answer.status_code for answer in answers) == {200: MOST, 503: refused} and most == 1
    assert client.get("/individuals/lab:50/genome.svg").content == b"a picture", "the queue is empty again"
    assert client.get("/individuals/nix:1/genome.svg").status_code == 404
