"""Rankings: the rules of `best`, `best_of_search` and `pareto`, and that they read indexes only."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import pytest
from sqlalchemy import event
from store_samples import decided, digest, evaluation, individual, scored, search, split

from moevolve.store.errors import StoreError
from moevolve.store.records import FULL_MODEL
from moevolve.store.repository import Store

DAY = datetime(2026, 1, 1, tzinfo=UTC)


def test_dev_scores_come_first_then_search_scores(store: Store) -> None:
    """0 failed, 1..5 scored on search; 2 and 4 also on dev, the better on search being worse on dev."""
    store.create_search(search(created_at=DAY), [split(), split(name="dev")])
    assert store.best("rte") == store.best() == store.pareto("rte") == store.best_of_search("id-alpha", 3) == []
    for index, score in enumerate((None, 0.9, 0.8, 0.7, 0.6, 0.5)):
        scored(store, "id-alpha", index, score)
    store.record("id-alpha", evaluations=[evaluation(2, 0.55, name="dev"), evaluation(4, 0.65, name="dev")])
    rows = store.best("rte")
    assert indices(rows) == [4, 2, 1, 3, 5]
    assert [row.ranked_by for row in rows] == ["dev", "dev", "search", "search", "search"]
    assert [row.score for row in rows] == [0.65, 0.55, 0.9, 0.7, 0.5]
    first = rows[0]
    assert (first.search_score, first.dev_score, first.test_score) == (0.6, 0.65, None)
    assert (first.ref, first.experts, first.active, first.parameters) == ("alpha:4", 4, 2, 2_000)
    assert indices(store.best("rte", limit=3)) == [4, 2, 1] and indices(store.best("rte", limit=1)) == [4]
    assert indices(store.best("rte", by="search")) == [1, 2, 3, 4, 5]
    assert store.best("rte", by="test") == []
    # What failed on dev isn't offered by dev.
    store.record("id-alpha", evaluations=[evaluation(5, 0.4, name="test"), evaluation(1, None, name="dev")])
    (row,) = store.best("rte", by="test")
    assert (row.index, row.score, row.search_score) == (5, 0.4, 0.5)
    assert indices(store.best("rte")) == [4, 2, 3, 5]
    assert indices(store.best("rte", by="search"))[0] == 1


def test_rankings_can_be_of_one_model(store: Store) -> None:
    for name, score in (("alpha", 0.5), ("beta", 0.9)):
        about = {"model_fingerprint": digest(name), "model_path": f"models/{name}"}
        store.create_search(search(name, **about), [split()])
        found = [evaluation(one, score, phenotype_hash=one, model_fingerprint=digest(name)) for one in ("full", name)]
        store.record(f"id-{name}", [decided(individual(0, phenotype_hash=name, operator="reap"), score)], found)
    here = {"model": "models/alpha"}
    assert [row.ref for row in store.best("rte")] == ["beta:0", "alpha:0"]
    for rows in (store.best("rte", **here), store.pareto("rte", **here)):
        assert [row.ref for row in rows] == ["alpha:0"]
    assert (store.full_score("rte"), store.full_score("rte", **here)) == (0.9, 0.5)
    assert store.best("rte", search="beta", **here) == store.best("rte", model="models/none") == []


def indices(rows: list) -> list[int]:
    return [row.index for row in rows]


def test_failed_pending_and_full_models_never_appear(store: Store) -> None:
    store.create_search(search(), [split(), split("copa")])
    store.record("id-alpha", [individual(i) for i in range(4)])
    # 0 failed on another task, 1 is pending, 2 is fine; the full model and an orphan have no individual.
    batch = [evaluation(i, 0.9) for i in range(3)]
    batch += [
        evaluation(0, None, "copa"),
        evaluation(0, 1.0, phenotype_hash=FULL_MODEL, experts=None),
        evaluation(99, 1.0),
    ]
    store.record("id-alpha", [decided(0, None), decided(2, 0.9)], batch)
    assert indices(store.best("rte")) == [2]
    assert indices(store.best("rte", by="search", limit=1)) == [2]
    assert indices(store.best_of_search("id-alpha", 5)) == [2]
    assert indices(store.pareto("rte")) == [2]


def test_ties_fall_to_age_and_one_phenotype_is_one_row_under_its_earliest_individual(store: Store) -> None:
    store.create_search(search("young", created_at=DAY + timedelta(1)), [split()])
    store.create_search(search("old", created_at=DAY), [split()])
    scored(store, "id-young", 0, 0.5, phenotype="a")
    scored(store, "id-old", 7, 0.5, phenotype="b")
    scored(store, "id-old", 5, 0.5, phenotype="c")
    scored(store, "id-old", 3, 0.5, phenotype="d", gold=-float("inf"))
    scored(store, "id-old", 9, 0.5, phenotype="e", gold=-0.5)
    assert [row.ref for row in store.best("rte")] == ["old:9", "old:5", "old:7", "young:0", "old:3"]
    assert indices(store.best_of_search("id-old", 9)) == [9, 5, 7, 3]
    for name, index in (("young", 1), ("young", 2), ("old", 8), ("old", 6)):
        scored(store, f"id-{name}", index, 0.9, phenotype="same")
    assert [row.ref for row in store.best("rte", limit=2)] == ["old:6", "old:9"]
    assert [row.ref for row in store.best("rte", search="young")] == ["young:1", "young:0"]
    assert indices(store.best_of_search("id-young", 5)) == [1, 0]


def test_another_model_or_engine_is_another_configuration(store: Store) -> None:
    store.create_search(search("one", created_at=DAY), [split()])
    store.create_search(search("two", created_at=DAY + timedelta(1), model_fingerprint="n" * 64), [split()])
    for name, model, score in (("one", "m" * 64, 0.5), ("two", "n" * 64, 0.6)):
        one = evaluation("p", score, model_fingerprint=model)
        store.record(f"id-{name}", [decided(individual(0, phenotype="p"), score)], [one])
    store.record("id-one", evaluations=[evaluation("p", 0.99, engine_fingerprint="other")])
    rows = store.best("rte")
    assert [(row.ref, row.score, row.model_fingerprint[0]) for row in rows] == [
        ("two:0", 0.6, "n"),
        ("one:0", 0.5, "m"),
    ]
    assert [(row.ref, row.score) for row in store.best("rte", search="one")] == [("one:0", 0.5)]


def test_filters_and_tasks(store: Store) -> None:
    store.create_search(search(), [split(), split("copa")])
    shapes = {0: (4, 2), 1: (4, 1), 2: (2, 1), 3: (6, 2)}
    for index, (experts, active) in shapes.items():
        scored(store, "id-alpha", index, 0.1 * index + 0.1, experts=experts, active=active)
    store.record("id-alpha", evaluations=[evaluation(0, 0.3, "copa"), evaluation(1, 0.2, "copa")])
    assert indices(store.best("rte", experts=4)) == [1, 0]
    assert indices(store.best("rte", experts=4, active=2)) == [0]
    assert indices(store.best("rte", active=1)) == [2, 1]
    assert store.best("rte", experts=5) == []
    assert [(row.task, row.index) for row in store.best(limit=2)] == [("copa", 0), ("copa", 1), ("rte", 3), ("rte", 2)]
    # Scores on another version of the data (another fingerprint) stay out of a ranking of one search.
    store.record("id-alpha", evaluations=[evaluation(1, 0.9, task_fingerprint="newer")])
    best = {one: store.best("rte", search=one, by="search", limit=2) for one in ("alpha", None)}
    assert [(row.index, row.score) for row in best["alpha"]] == [(3, 0.4), (2, pytest.approx(0.3))]
    assert [(row.index, row.score) for row in best[None]] == [(1, 0.9), (3, 0.4)]
    with pytest.raises(StoreError, match=r"no task 'rtee'.*did you mean rte"):
        store.best("rtee")
    with pytest.raises(StoreError, match="did you mean alpha"):
        store.best("rte", search="alpa")
    for wrong in ({"by": "train"}, {"by": "calibration"}, {"limit": 0}):
        with pytest.raises(StoreError, match="a ranking needs"):
            store.best("rte", **wrong)


def test_rankings_agree_with_sorting_everything(store: Store) -> None:
    """Against a plain sort of a random population full of ties, repeats and failures."""
    rng = np.random.default_rng(5)
    store.create_search(search(created_at=DAY), [split(), split(name="dev")])
    truth: dict[int, tuple[float, float, int]] = {}
    dev: dict[int, float] = {}
    for index in range(80):
        phenotype = int(rng.integers(0, 55))
        draw = np.random.default_rng([phenotype])
        score = None if phenotype % 9 == 0 else float(draw.integers(0, 5)) / 5
        gold = -float(draw.integers(0, 3))
        experts = int(draw.integers(2, 5))
        scored(
            store, "id-alpha", index, score, gold=gold, phenotype=phenotype, experts=experts, parameters=experts * 10
        )
        if score is not None and phenotype not in truth:
            truth[phenotype] = (-score, -gold, index)
            if phenotype % 7 == 0:
                dev[phenotype] = float(draw.integers(0, 3)) / 3
                one = evaluation(phenotype, dev[phenotype], name="dev", gold_logprob=gold, experts=experts)
                store.record("id-alpha", evaluations=[one])
    by_search = [index for *_, index in sorted(truth.values())]
    assert [row.index for row in store.best("rte", by="search", limit=1000)] == by_search
    assert indices(store.best_of_search("id-alpha", 1000)) == by_search
    by_dev = [index for *_, index in sorted((-dev[p], *truth[p][1:]) for p in dev)]
    rest = [index for *_, index in sorted(truth[p] for p in truth if p not in dev)]
    assert indices(store.best("rte", limit=1000)) == by_dev + rest


def test_the_pareto_front_rises_with_the_parameters(store: Store) -> None:
    store.create_search(search(), [split()])
    points = [(100, 0.3), (100, 0.4), (200, 0.35), (300, 0.6), (300, 0.6), (400, 0.6), (500, 0.9), (600, None)]
    for index, (parameters, score) in enumerate(points):
        scored(store, "id-alpha", index, score, parameters=parameters)
    front = store.pareto("rte")
    assert [(row.parameters, row.score, row.index) for row in front] == [(100, 0.4, 1), (300, 0.6, 3), (500, 0.9, 6)]
    assert store.pareto("rte", "dev") == []
    assert store.pareto("rte", search="alpha") == front
    with pytest.raises(StoreError, match="Pareto"):
        store.pareto("rte", "train")  # type: ignore[arg-type]


def test_rankings_read_indexes_not_tables(tmp_path: Path) -> None:
    """SQLite's own plans: no scan of a table that grows, and no sort of more than the rows returned."""
    grown = ("individuals", "evaluations", "parents", "other", "earlier")
    with Store.open(f"sqlite:///{tmp_path / 'store.db'}") as store:
        store.create_search(search(), [split(), split(name="dev")])
        for index in range(20):
            scored(store, "id-alpha", index, index / 20, parents=[index - 1] if index else [])
        statements: list[tuple[str, object]] = []

        @event.listens_for(store._engine, "after_cursor_execute")
        def note(_c: object, _cursor: object, statement: str, values: object, _context: object, _many: bool) -> None:
            if statement.lstrip().startswith(("SELECT", "WITH")):
                statements.append((statement, values))

        store.best("rte", experts=4, active=2)
        store.best("rte", search="alpha", by="search")
        store.best_of_search("id-alpha", 5)
        store.pareto("rte")
        store.ancestors("alpha:19")
        store.children("alpha:3")
        store.individual("alpha:5")
        ranking = list(statements)
        store.costs(store.search("alpha"))
        raw = store._engine.raw_connection()

        def plan(statement: str, values: object) -> list[str]:
            return [row[-1] for row in raw.cursor().execute(f"EXPLAIN QUERY PLAN {statement}", values)]

        for statement, values in ranking:
            steps = plan(statement, values)
            assert not [step for step in steps if step.startswith(tuple(f"SCAN {name}" for name in grown))], statement
            if "LIMIT" in statement and "FROM evaluations" in statement:
                assert not [step for step in steps if "TEMP B-TREE" in step], statement
        # Costs are sums over all evaluations of a search, whose outcomes are long.
        sums = "SEARCH evaluations USING COVERING INDEX ix_evaluations_costs (context_id=? AND phenotype_hash=?)"
        assert sums in plan(*statements[-1])
        raw.close()
        assert len(ranking) > 20


def test_models_are_ranked_together_and_age_decides_at_the_limit(store: Store) -> None:
    for place, (name, values) in enumerate({"one": [0.9, 0.5, 0.4], "two": [0.8, 0.5, 0.45]}.items()):
        model = name[0] * 64
        store.create_search(search(name, created_at=DAY + timedelta(place), model_fingerprint=model), [split()])
        for index, score in enumerate(values):
            found = evaluation(index, score, model_fingerprint=model)
            store.record(f"id-{name}", [decided(index, score)], [found])
    expected = ["one:0", "two:0", "one:1", "two:1", "two:2", "one:2"]
    for limit in range(1, 7):
        assert [row.ref for row in store.best("rte", limit=limit)] == expected[:limit]
    # A dev score on one model says nothing of another.
    store.record("id-one", evaluations=[evaluation(0, 0.7, name="dev", model_fingerprint="o" * 64)])
    rows = store.best("rte", by="dev", limit=2)
    assert [(row.ref, row.ranked_by) for row in rows] == [("one:0", "dev"), ("two:0", "search")]
