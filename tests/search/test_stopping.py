"""Early stopping in whole searches: nothing changes but what is left out, whoever evaluates and whatever is known."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from search_lab import Stopped, drive, population, run_config
from stopping_lab import WorkerPool, begin, pool_of, stopping_plan

from moevolve.search.completing import leaders_of
from moevolve.search.config import RunConfig
from moevolve.search.config_files import parse_run_config
from moevolve.search.desk import EvaluationDesk, Job
from moevolve.store.records import HistoryRow
from moevolve.store.repository import Store

Opener = Callable[[str], Store]
PHASES = [
    {"kind": "prune", "evaluations": 60, "initial": 12, "row_rate": 0.3},
    {"kind": "merge", "evaluations": 40, "entry_rate": 0.1},
]


def with_parents(rule: dict[str, Any]) -> dict[str, Any]:
    return {"phases": [{**phase, "parents": rule} for phase in PHASES]}


MODES: dict[str, dict[str, Any]] = {
    "top 5": with_parents({"rule": "top_k", "k": 5}),
    "top 1": with_parents({"rule": "top_k", "k": 1}),
    "threshold": with_parents({"rule": "threshold", "margin": 0.04}),
    "generations": {
        **with_parents({"rule": "top_k", "k": 4}),
        "strategy": {"kind": "evolution", "mode": "generations", "generation": 9},
    },
    "two tasks": {**with_parents({"rule": "top_k", "k": 5}), "tasks": [{"name": "one", "weight": 3}, {"name": "two"}]},
    "wide window": {**with_parents({"rule": "top_k", "k": 3}), "window": 30, "final": {"rerank": 2}},
    "three phases": {
        "phases": [
            {**PHASES[0], "evaluations": 40, "parents": {"rule": "top_k", "k": 2}},
            {"kind": "prune", "evaluations": 4, "initial": 1, "parents": {"rule": "top_k", "k": 2}},
            {**PHASES[1], "parents": {"rule": "top_k", "k": 2}},
        ],
        "final": {"rerank": 0},
    },
}
modes = pytest.mark.parametrize("mode", MODES)


@pytest.fixture
def open_store(tmp_path: Path) -> Iterator[Opener]:
    opened: list[Store] = []

    def open_one(name: str) -> Store:
        opened.append(Store.open(f"sqlite:///{tmp_path / name}.db"))
        return opened[-1]

    yield open_one
    for store in opened:
        store.close()


def searched(store: Store, config: RunConfig, seed: int = 0, **pool: Any) -> tuple[list[HistoryRow], WorkerPool]:
    plan = begin(store, config)
    used = pool_of(plan, seed, **pool)
    drive(store, plan, used)
    return store.history(plan.search_id), used


def made(rows: list[HistoryRow]) -> list[tuple[Any, ...]]:
    return [(row.index, row.operator, row.genome, row.content_hash, row.parents, row.depth) for row in rows]


@modes
@pytest.mark.parametrize("seed", [1, 2])
def test_a_search_is_the_same_with_and_without(open_store: Opener, mode: str, seed: int) -> None:
    config = run_config(seed=seed, **MODES[mode])
    whole, whole_pool = searched(open_store("off"), config.model_copy(update={"early_stopping": "off"}))
    store = open_store("exact")
    rows, pool = searched(store, config)
    assert made(rows) == made(whole)
    stopped = [(row, other) for row, other in zip(rows, whole, strict=True) if row.status == "stopped"]
    for row, other in zip(rows, whole, strict=True):
        if row.status != "stopped":
            values = (row.status, row.fitness, row.tie_break, row.failure)
            assert values == (other.status, other.fitness, other.tie_break, other.failure)
    count = max(1, config.final.rerank)
    best = [(row.index, row.fitness) for row in store.best_of_search("lab-1", count)]
    off = sorted((row for row in whole if row.fitness is not None), key=lambda r: (-r.fitness, -r.tie_break, r.index))
    firsts = {row.phenotype_hash: row for row in reversed(off)}
    leaders = sorted(firsts.values(), key=off.index)[:count]
    assert best == [(row.index, row.fitness) for row in leaders]
    parents = {parent for row in rows for parent in row.parents}
    for row, other in stopped:
        assert row.fitness is None and row.tie_break is None and row.bound is not None
        assert row.failure is not None and row.failure.startswith("stopped after ")
        if other.fitness is not None:  # one that fails later may be stopped before
            assert other.fitness <= row.bound < min(leader.fitness or 0 for leader in leaders)
        assert row.index not in parents and row.operator not in ("random", "start")
    assert len(stopped) > 5
    assert pool.examples < whole_pool.examples


@modes
def test_workers_and_interruptions_stop_nobody_else(open_store: Opener, mode: str) -> None:
    config = run_config(**MODES[mode])
    rows, _ = searched(open_store("calm"), config, workers=1, repeat=0.0)
    expected = [(row, row.bound) for row in rows]
    for workers in (2, 40):
        store = open_store(f"unruly-{workers}")
        found, _ = searched(store, config, workers, workers=workers, repeat=0.5)
        assert [(row, row.bound) for row in found] == expected
    store = open_store("killed")
    begin(store, config)
    rng = np.random.default_rng(3)
    for attempt in range(10):
        plan = stopping_plan(config)
        stop_at = int(rng.integers(25)) if attempt < 4 else None
        try:
            drive(store, plan, pool_of(plan, attempt, workers=int(rng.integers(1, 8)), stop_at=stop_at))
            break
        except Stopped:
            continue
    assert [(row, row.bound) for row in store.history("lab-1")] == expected


def test_optimisers_that_learn_from_every_score_stop_nobody(open_store: Opener) -> None:
    rows, _ = searched(open_store("s"), run_config(strategy="nevergrad:TwoPointsDE"))
    assert {row.status for row in rows} == {"ok", "failed"}


def test_a_second_search_reuses_bounds_that_do_and_replaces_those_that_do_not(open_store: Opener) -> None:
    store = open_store("s")
    config = run_config(**MODES["top 5"])
    rows, _ = searched(store, config)
    assert any(row.status == "stopped" for row in rows)
    twin = begin(store, config.model_copy(update={"name": "twin"}), "lab-2")
    pool = pool_of(twin, 1)
    drive(store, twin, pool)
    assert pool.requests == []
    assert population(store, "lab-2") == population(store, "lab-1")
    assert [row.bound for row in store.history("lab-2")] == [row.bound for row in rows]
    # Nobody is stopped here: what has only a bound runs again, the rest doesn't.
    off = config.model_copy(update={"name": "off", "early_stopping": "off"})
    third = begin(store, off, "lab-3")
    pool = pool_of(third, 2)
    drive(store, third, pool)
    half = {row.phenotype_hash for row in rows if row.status == "stopped"}
    assert set(pool.submitted) == half and all(request.floor is None for request in pool.requests)
    assert [row.status for row in store.history("lab-3")].count("stopped") == 0
    alone, _ = searched(open_store("alone"), config.model_copy(update={"early_stopping": "off"}))
    assert population(store, "lab-3") == population(open_store("alone"), "lab-1")
    # From now on the evaluations count, for others too; what the first search said of itself stays.
    fourth = begin(store, config.model_copy(update={"name": "fourth"}), "lab-4")
    drive(store, fourth, pool_of(fourth, 3))
    assert [row.fitness for row in store.history("lab-4")] == [row.fitness for row in alone]
    assert store.history("lab-1") == rows


def first_stopped(store: Store, rows: list[HistoryRow]) -> HistoryRow:
    return next(row for row in rows if row.status == "stopped" and row.bound is not None)


def desk_of(store: Store, plan: Any) -> tuple[EvaluationDesk, WorkerPool]:
    pool = pool_of(plan, 5)
    return EvaluationDesk(store, pool, plan.facts.fingerprint, "engine"), pool


def test_a_bound_does_for_a_higher_floor_only(open_store: Opener) -> None:
    store = open_store("s")
    config = run_config(**MODES["top 5"])
    rows, used = searched(store, config)
    row = first_stopped(store, rows)
    plan = stopping_plan(config)
    job = plan.job(plan.space.from_bytes(row.genome), "search")
    floor = next(r.floor for r in used.requests if r.edit.phenotype_hash == row.phenotype_hash)
    assert floor is not None and row.bound is not None and row.bound < floor.least
    desk, pool = desk_of(store, plan)
    (same,) = desk.request([replace(job, floor=floor)])
    assert same.reused and same.stop is not None and same.stop.bound == row.bound
    assert pool.requests == []
    # The bound reaches this floor, so that is not known of the score.
    assert desk.request([replace(job, floor=replace(floor, least=row.bound))]) == []
    (request,) = pool.requests
    assert request.floor is None
    (whole,) = desk.run([job])
    assert whole.stop is None and whole.evaluations[0].score is not None
    assert whole.evaluations[0].score <= row.bound


def test_who_wants_a_score_never_gets_a_bound(open_store: Opener) -> None:
    store = open_store("s")
    config = run_config(**MODES["top 5"])
    rows, used = searched(store, config)
    row = first_stopped(store, rows)
    plan = stopping_plan(config)
    job = plan.job(plan.space.from_bytes(row.genome), "search")
    assert store.evaluations(row.phenotype_hash, "weights", "engine", job.key[1]) == []
    fresh = open_store("fresh")
    begin(fresh, config)
    desk, pool = desk_of(fresh, plan)
    floor = next(r.floor for r in used.requests if r.edit.phenotype_hash == row.phenotype_hash)
    hopeful: Job = replace(job, floor=floor)
    desk.request([hopeful])
    (settled,) = desk.run([job])  # the same phenotype is under way with a floor
    assert settled.stop is None and len(settled.evaluations) == 1
    assert [request.floor is None for request in pool.requests] == [False, True]
    assert len(desk.unsaved_bounds) == 1


def test_raising_the_number_of_leaders_evaluates_the_stopped_ones_that_may_be_among_them(open_store: Opener) -> None:
    store = open_store("s")
    config = run_config(**MODES["top 5"], final={"rerank": 2})
    rows, _ = searched(store, config)
    whole_store = open_store("off")
    searched(whole_store, config.model_copy(update={"early_stopping": "off"}))
    plan = stopping_plan(config.model_copy(update={"final": config.final.model_copy(update={"rerank": 70})}))
    desk, pool = desk_of(store, plan)
    leaders = leaders_of(plan, store, desk)
    assert [(row.index, row.fitness) for row in leaders] == [
        (row.index, row.fitness) for row in whole_store.best_of_search("lab-1", 70)
    ]
    assert pool.requests and {row.index for row in leaders} & {row.index for row in rows if row.status == "stopped"}
    completed = store.history("lab-1")
    assert all(row.bound is None for row in completed if row.status == "ok")
    drive(store, plan, pool_of(plan, 6))
    assert store.history("lab-1") == completed
    asked = len(pool.requests)
    assert leaders_of(plan, store, desk) == leaders and len(pool.requests) == asked


def test_racing_is_off_unless_named_and_stops_more(open_store: Opener) -> None:
    config = run_config(**MODES["top 5"])
    assert config.early_stopping == "exact"
    exact, exact_pool = searched(open_store("exact"), config)
    racing = run_config(**MODES["top 5"], early_stopping="racing", racing={"alpha": 0.3})
    store = open_store("racing")
    rows, pool = searched(store, racing)
    assert pool.examples < exact_pool.examples
    raced = [row for row in rows if (row.failure or "").startswith("raced out after ")]
    assert raced and all("at most" in str(row.failure) and "70 % confidence" in str(row.failure) for row in raced)
    assert all(row.status == "stopped" for row in raced)
    again, _ = searched(open_store("again"), racing, 9, workers=9)
    assert again == rows
    assert "raced" not in " ".join(row.failure or "" for row in exact)


def test_the_way_of_stopping_makes_no_other_search_unless_it_is_racing() -> None:
    exact, off = run_config(), run_config(early_stopping="off")
    racing = run_config(early_stopping="racing")
    assert exact.config_hash == off.config_hash != racing.config_hash
    assert racing.config_hash != run_config(early_stopping="racing", racing={"alpha": 0.1}).config_hash
    with pytest.raises(ValueError, match="racing: goes with early_stopping: racing, not exact"):
        run_config(racing={"alpha": 0.1})
    data = run_config().model_dump(mode="json") | {"early_stopping": False}
    assert parse_run_config(data, "x").early_stopping == "off"
