"""Stored searches beside each other: groups, settings that differ, and tests, recomputed by hand."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import binomtest
from sqlalchemy import select, update
from store_samples import decided, evaluation, individual, search, split

from moevolve.search.results.comparison import compare_searches
from moevolve.store.records import FULL_MODEL
from moevolve.store.repository import Store
from moevolve.store.tables import events

BEGUN = datetime(2026, 1, 1, tzinfo=UTC)
RIGHT = {"one-1": 6, "one-2": 7, "two-2": 1, "two-3": 2}
"""Of ten test examples, how many the winner of each search gets right."""


def outcomes(right: int) -> bytes:
    return (np.arange(10) < right).astype("<f4").tobytes()


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    with Store.open(f"sqlite:///{tmp_path_factory.mktemp('comparison') / 'store.db'}") as opened:
        for name, right in RIGHT.items():
            method, seed = name.split("-")
            config = {"name": name, "seed": int(seed), "genome": {"experts": 4 if method == "one" else 2, "groups": 1}}
            config["phases"] = [{"init": ["reap"], "repair": {"tokens": 8} if method == "two" else None}]
            record = search(name, config=json.dumps(config), seed=int(seed))
            opened.create_search(record, [split(), split(name="test")])
            opened.set_status(record.id, "running")
            for index, fitness in enumerate((0.25, 0.125, 0.5 + right / 100, 0.5)):
                opened.record(record.id, [decided(index, fitness)], [])
            winner = individual(4, phenotype=f"winner of {name}")
            scored = evaluation(f"winner of {name}", right / 10, name="test", outcomes=outcomes(right))
            opened.record(record.id, [decided(winner, 0.25)], [scored])
            opened.set_status(record.id, "finished", winner=4)
        yield opened


def test_hours_are_those_in_which_a_search_ran(tmp_path: Path) -> None:
    with Store.open(f"sqlite:///{tmp_path / 'store.db'}") as opened:
        opened.create_search(search(), [split()])
        opened.set_status("id-alpha", "running")
        opened.record("id-alpha", [decided(0, 0.25)])
        opened.set_status("id-alpha", "paused")
        opened.set_status("id-alpha", "running")
        opened.record("id-alpha", [decided(1, 0.125), decided(2, 0.5)])
        opened.set_status("id-alpha", "running")  # after a driver that was killed
        opened.record("id-alpha", [decided(3, 0.75)])
        opened.set_status("id-alpha", "finished")
        with opened.write_transaction() as connection:
            for seq in connection.execute(select(events.c.seq)).scalars().all():
                connection.execute(update(events).where(events.c.seq == seq).values(at=BEGUN + timedelta(hours=seq)))
        assert opened.hours("id-alpha") == 5.0


def test_searches_that_differ_in_the_seed_are_a_group(store: Store) -> None:
    found = compare_searches(store, ["one-2", "two-3", "id-one-1", "two-2"])
    assert [(one.name, one.group, one.individuals, round(one.best or 0, 2)) for one in found.searches] == [
        ("one-1", 0, 5, 0.56),
        ("one-2", 0, 5, 0.57),
        ("two-2", 1, 5, 0.51),
        ("two-3", 1, 5, 0.52),
    ]
    assert {row.name: row.values for row in found.settings} == {
        "seed": ("1", "2", "2", "3"),
        "genome.experts": ("4", "4", "2", "2"),
        "phases.0.repair": ("null", "null", "set", "set"),
        "phases.0.repair.tokens": ("-", "-", "8", "8"),
    }


def test_winners_are_tested_on_the_same_examples(store: Store) -> None:
    found = compare_searches(store, ["one-1", "two-2"])
    first, second = found.models
    assert first.test is None and second.test is not None
    assert second.test.p == second.corrected == pytest.approx(binomtest(0, RIGHT["one-1"] - RIGHT["two-2"]).pvalue)
    score = second.score("test")
    assert score is not None and score.score == pytest.approx(0.1) and found.comparable
    assert "between seeds" in found.note
    both = compare_searches(store, list(RIGHT))
    assert [model.refs for model in both.models] == [("one-1:4", "one-2:4"), ("two-2:4", "two-3:4")]
    mean = both.models[0].score("test")
    assert (
        mean is not None
        and mean.score == pytest.approx(0.65)
        and mean.spread == pytest.approx(np.std([0.6, 0.7], ddof=1))
    )
    # Only seed 2 has a search in both groups.
    assert both.models[1].test is not None and both.models[1].test.seeds == 1


def test_the_full_model_stands_beside_the_winners(store: Store) -> None:
    store.add_evaluations([evaluation(0, 0.9, name="test", outcomes=outcomes(9), phenotype_hash=FULL_MODEL)])
    full = compare_searches(store, ["one-1"]).models[0]
    assert full.label == "full model" and full.group is None
    score = full.score("test")
    assert score is not None and score.score == 0.9 and full.parameters == 2**40
