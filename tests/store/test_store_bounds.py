"""Bounds of stopped individuals, on every backend: kept apart from scores, and gone from sight once there is one."""

from __future__ import annotations

import numpy as np
import pytest
from store_samples import ENGINE, MODEL, digest, evaluation, fitness, individual, scored, search, split

from moevolve.store.errors import StoreError
from moevolve.store.lineage import to_dot
from moevolve.store.records import BoundRecord, FitnessRecord
from moevolve.store.repository import Store

SEEN = np.array([1, 0, np.nan, np.nan], "<f4").tobytes()


def bound(phenotype: object, value: float = 0.75, task: str = "rte", seconds: float = 0.5) -> BoundRecord:
    return BoundRecord(
        phenotype_hash=digest("phenotype", phenotype),
        model_fingerprint=MODEL,
        engine_fingerprint=ENGINE,
        task_fingerprint=digest(task, "search"),
        task=task,
        split="search",
        bound=value,
        outcomes=SEEN,
        examples_seen=2,
        seconds=seconds,
        worker="w",
    )


def stopped(index: int, value: float | None = 0.75, reason: str | None = "stopped after 2 of 4") -> FitnessRecord:
    return FitnessRecord(index, "stopped", failure=reason, bound=value)


@pytest.fixture
def stored(store: Store) -> Store:
    """Individual 0 is scored, its child 1 was stopped."""
    store.create_search(search(), [split()])
    scored(store, "id-alpha", 0, 0.5)
    store.record("id-alpha", [individual(1, [0])], fitness=[stopped(1)], bounds=[bound(1)])
    return store


def test_a_bound_comes_back_and_is_no_score(stored: Store) -> None:
    (found,) = stored.bounds([digest("phenotype", 1)], MODEL, ENGINE, [digest("rte", "search")])
    assert (found.bound, found.examples_seen, found.examples, found.outcomes) == (0.75, 2, 4, SEEN)
    assert stored.evaluations(digest("phenotype", 1), MODEL, ENGINE, [digest("rte", "search")]) == []
    row = stored.history("id-alpha")[1]
    assert (row.status, row.fitness, row.bound, row.failure) == ("stopped", None, 0.75, "stopped after 2 of 4")
    detail = stored.individual("alpha:1")
    assert detail.evaluations == () and detail.bounds == (found,)
    assert detail.fitness == stopped(1)
    # 0.75 would be the best of all.
    assert [one.index for one in stored.best("rte", by="search")] == [0]
    assert [one.index for one in stored.best_of_search("id-alpha", 9)] == [0]
    assert [one.index for one in stored.pareto("rte")] == [0]
    (summary,) = stored.searches()
    assert (summary.evaluated, summary.failed, summary.stopped, summary.pending) == (1, 0, 1, 0)
    assert summary.best_fitness == 0.5
    assert 'stopped", style=dashed' in to_dot(stored.descendants("alpha:0"))


def test_writing_it_again_changes_nothing(stored: Store) -> None:
    stored.record("id-alpha", [individual(1, [0])], fitness=[stopped(1)], bounds=[bound(1, 0.9)])
    (found,) = stored.bounds([digest("phenotype", 1)], MODEL, ENGINE, [digest("rte", "search")])
    assert found.bound == 0.75 and stored.history("id-alpha")[1].bound == 0.75


def test_an_evaluation_takes_its_place_and_its_cost_stays(stored: Store) -> None:
    before = stored.costs(stored.search("alpha")).splits[0]
    assert (before.evaluations, before.stopped, before.seconds) == (1, 1, 0.5)
    stored.record(
        "id-alpha", evaluations=[evaluation(1, 0.25, seconds=2.0, examples_seen=4)], fitness=[fitness(1, 0.25)]
    )
    detail = stored.individual("alpha:1")
    assert detail.bounds == () and [one.score for one in detail.evaluations] == [0.25]
    assert (detail.fitness.status, detail.fitness.fitness, detail.fitness.bound) == ("ok", 0.25, None)
    assert [one.index for one in stored.best_of_search("id-alpha", 9)] == [0, 1]
    after = stored.costs(stored.search("alpha")).splits[0]
    assert (after.evaluations, after.stopped, after.seconds, after.examples) == (2, 1, 2.5, 6)
    with pytest.raises(StoreError, match="already is ok"):
        stored.record("id-alpha", fitness=[stopped(1)])


@pytest.mark.parametrize("bad", [stopped(1, None), stopped(1, float("inf")), stopped(1, reason=None)])
def test_a_stopped_individual_needs_a_bound_and_a_reason(store: Store, bad: FitnessRecord) -> None:
    store.create_search(search(), [split()])
    with pytest.raises(StoreError, match="fitness of individual 1"):
        store.record("id-alpha", [individual(0), individual(1)], fitness=[bad])
    assert store.history("id-alpha") == []


def test_a_scored_individual_is_not_stopped_afterwards(stored: Store) -> None:
    with pytest.raises(StoreError, match="already is ok with fitness"):
        stored.record("id-alpha", fitness=[stopped(0)])
