"""Drawings wait for each other, and no other request waits for them."""

from __future__ import annotations

import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor, as_completed
from itertools import islice
from typing import Any

import pytest
from starlette.testclient import TestClient
from waiting import PATIENT_S

from moevolve.search.operations import plot
from moevolve.search.server.turns import MOST


def test_waiting_drawings_do_not_block_other_requests(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    may_end, at_once, most = threading.Event(), 0, 0

    def draw(*_: Any) -> bytes:
        nonlocal at_once, most
        at_once += 1
        most = max(most, at_once)
        may_end.wait(PATIENT_S)
        at_once -= 1
        return b"a picture"

    monkeypatch.setattr(plot, "picture", draw)
    refused = 45 - MOST  # with those that wait more than all threads for answers
    with ThreadPoolExecutor(45) as browsers:
        asked = [browsers.submit(client.get, "/api/searches/lab/plot") for _ in range(45)]
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
    assert client.get("/api/searches/lab/plot").content == b"a picture", "the queue is empty again"
    assert client.get("/individuals/nix:1/genome.svg").status_code == 404
