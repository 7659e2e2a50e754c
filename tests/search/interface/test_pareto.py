"""Pareto fronts over the tasks of a search, and over score and size where it has one."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.testclient import TestClient
from store_samples import decided, evaluation, individual, search, split

from moevolve.evaluators.errors import UserError
from moevolve.search.interface.rankings import ParetoRequest
from moevolve.search.server.app import make_routes
from moevolve.search.server.settings import ServerSettings
from moevolve.store.pareto import unbeaten
from moevolve.store.records import FULL_MODEL
from moevolve.store.repository import Store

SCORES = {0: (0.5, 0.5), 1: (0.75, 0.25), 2: (0.25, 0.75), 3: (0.5, 0.25), 4: (0.25, 0.5), 5: (0.75, 0.25)}


@pytest.fixture
def store(store: Store) -> Store:
    """With a search on two tasks, of which individual 6 failed, and 7 isn't evaluated on the second."""
    store.create_search(search("two"), [split(task, name) for task in ("one", "other") for name in ("search", "dev")])
    for index, scores in SCORES.items():
        found = [evaluation(index, score, task) for task, score in zip(("one", "other"), scores, strict=True)]
        store.record("id-two", [decided(index, sum(scores) / 2)], found)
    store.record("id-two", [decided(6, None)], [evaluation(6, None, "one")])
    store.record("id-two", [individual(7)], [evaluation(7, 1.0, "one")])
    store.create_search(search("imported"), [])
    store.record("id-imported", [decided(0, 0.5)], [])
    store.record("id-two", [], [evaluation(0, 0.9, "one", phenotype_hash=FULL_MODEL)])
    return store


def test_those_that_no_other_beats_are_listed(store: Store) -> None:
    found = ParetoRequest(search="two", split="search").answer(store)
    assert found.tasks == ("one", "other") and [(mark.label, mark.scores) for mark in found.marks] == [
        ("full model", (0.9, None))
    ]
    # The first of two that score the same stands for both.
    assert [(one.ref, one.scores) for one in found.front] == [(f"two:{each}", SCORES[each]) for each in (1, 0, 2)]
    assert ParetoRequest(search="two", split="dev").answer(store).front == ()
    assert ParetoRequest(search="imported").answer(store).front == ()
    alone = ParetoRequest("one", search="two", split="search").answer(store)
    assert alone.tasks == ("one",) and [row.scores for row in alone.front] == [(0.75,)]
    with pytest.raises(UserError, match="name a task"):
        ParetoRequest().answer(store)


def test_the_command_shows_every_tasks_score(store: Store, in_process: Any) -> None:
    done = in_process("pareto", "--search", "two", "--split", "search", "--store", store.url)
    rows = [line.split() for line in done.stdout.splitlines() if "two:" in line]
    assert [row[1] for row in rows] == ["two:1", "two:0", "two:2"] and done.returncode == 0
    assert rows[0][3:6:2] == ["75.0", "25.0"] and "90.0" in done.stdout


def test_the_page_shows_every_tasks_score(store: Store) -> None:
    app = make_routes(store, ServerSettings.model_validate({"store": store.url}))
    page = (
        TestClient(app, "http://localhost", headers={"accept": "text/html"}).get("/pareto?search=two&split=search").text
    )
    assert "3 individuals of two that no other beats on all of one, other (search)" in page
    assert page.count("two:") == 6 and "90.0" in page and "data-pareto" not in page


@given(st.lists(st.tuples(*[st.integers(0, 3)] * 3), max_size=20))
def test_no_row_of_the_front_is_beaten_and_all_others_are(rows: list[tuple[int, ...]]) -> None:
    front = unbeaten(rows)

    def beaten(row: int) -> bool:
        others = (other for other in range(len(rows)) if other != row)
        return any(
            all(a >= b for a, b in zip(rows[other], rows[row], strict=True))
            and (rows[other] != rows[row] or other < row)
            for other in others
        )

    assert set(front) == {row for row in range(len(rows)) if not beaten(row)}
    assert [rows[row][0] for row in front] == sorted((rows[row][0] for row in front), reverse=True)
