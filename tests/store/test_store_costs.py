"""Sums for reports: what a search's evaluations cost, and how large its individuals are."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

from store_samples import digest, evaluation, individual, search, split

from moevolve.store.costs import SplitCost
from moevolve.store.records import FULL_MODEL
from moevolve.store.repository import Store

BORN = datetime(2026, 1, 2, tzinfo=UTC)
LATER = BORN + timedelta(hours=1)


def test_evaluations_are_summed_per_split(store: Store) -> None:
    tasks = [split("wic"), split("rte"), split("wic", "dev"), split("rte", "dev")]
    store.create_search(search(created_at=BORN), tasks)
    assert store.costs(store.search("alpha")).splits == (), "a new search cost nothing"
    one, two, three = individual(0), individual(1), individual(2, phenotype=0)
    found = [
        evaluation(0, 0.5, "wic", seconds=1.5, examples_seen=10, created_at=LATER),
        evaluation(1, None, "wic", seconds=0.5, created_at=LATER),
        evaluation(0, 0.5, "rte", seconds=2.0, examples_seen=20, created_at=BORN - timedelta(days=1)),
        evaluation(0, 0.5, "rte", "dev", seconds=4.0, examples_seen=7, created_at=LATER),
        # Not this search's: another phenotype, task, version of the task, engine.
        evaluation(9, 0.5, "wic", created_at=LATER),
        evaluation(0, 0.5, "boolq", created_at=LATER),
        evaluation(0, 0.5, "wic", task_fingerprint=digest("older"), created_at=LATER),
        evaluation(0, 0.5, "wic", engine_fingerprint="f" * 64, created_at=LATER),
    ]
    full = replace(
        evaluation(0, 0.9, "wic", seconds=1.0, examples_seen=10, created_at=LATER), phenotype_hash=FULL_MODEL
    )
    store.record("id-alpha", [one, two, three], [*found, full])
    costs = store.costs(store.search("alpha"))
    assert costs.phenotypes == 2
    assert costs.splits == (
        SplitCost("wic", "search", evaluations=3, earlier=0, failed=1, examples=20, seconds=3.0, seconds_alone=2.0),
        SplitCost("rte", "search", evaluations=1, earlier=1, failed=0, examples=20, seconds=0.0, seconds_alone=2.0),
        SplitCost("rte", "dev", evaluations=1, earlier=0, failed=0, examples=7, seconds=4.0, seconds_alone=4.0),
    )
