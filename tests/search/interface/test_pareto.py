"""Pareto fronts of score and size, and the full model's score beside them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from store_samples import decided, evaluation, individual, search, split

from moevolve.search.interface.rankings import ParetoRequest
from moevolve.store.records import FULL_MODEL
from moevolve.store.repository import Store


def test_the_command_shows_the_front_and_the_full_model(store: Store, in_process: Any) -> None:
    store.create_search(search("one"), [split("one")])
    for index, score in enumerate((0.5, 0.75, 0.7)):
        size = {"parameters": 1000 * (index + 1), "active_parameters": 1000 * (3 - index)}
        scored = replace(evaluation(index, score, "one"), **size)
        store.record("id-one", [decided(replace(individual(index), **size), score)], [scored])
    store.record("id-one", [], [evaluation(0, 0.9, "one", phenotype_hash=FULL_MODEL)])
    found = ParetoRequest("one", split="search").answer(store)
    assert [row.ref for row in found.front] == ["one:0", "one:1"] and found.full == 0.9
    active = ParetoRequest("one", split="search", size="active_parameters").answer(store)
    assert [row.ref for row in active.front] == ["one:2", "one:1"]
    assert ParetoRequest("one").answer(store).front == ()
    done = in_process("pareto", "one", "--split", "search", "--store", store.url)
    rows = [line.split() for line in done.stdout.splitlines() if "one:" in line or "full model" in line]
    assert done.returncode == 0 and [row[0] for row in rows[-3:]] == ["one:0", "one:1", "full"]
    assert "90.0" in rows[-1]
