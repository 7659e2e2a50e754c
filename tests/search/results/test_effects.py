"""What came of each operator's individuals, against the same from plain definitions."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from scipy.stats import ttest_1samp
from search_lab import UnrulyPool, drive, run_config, start

from moevolve.search.results.effects import effects
from moevolve.store.repository import Store


def test_operators_are_judged_by_gains_over_the_best_parent(tmp_path: Path) -> None:
    with Store.open(f"sqlite:///{tmp_path / 'store.db'}") as store:
        start(store, run_config(name="empty"), "empty-1")
        assert effects(store, "empty").operators == ()
        drive(store, start(store, run_config(), "lab-1"), UnrulyPool(2))
        found = effects(store, "lab").operators
        rows = {row.index: row for row in store.history("lab-1") if row.fitness is not None}
    assert sum(each.individuals for each in found) == len(rows)
    assert list(dict.fromkeys(each.phase for each in found)) == list(dict.fromkeys(row.phase for row in rows.values()))
    so_far = np.maximum.accumulate([row.fitness or 0.0 for row in rows.values()])
    bests = {index for place, index in enumerate(rows) if place == 0 or so_far[place] > so_far[place - 1]}
    for each in found:
        mine = [row for row in rows.values() if (row.phase, row.operator) == (each.phase, each.operator)]
        gains = [
            (row.fitness or 0.0) - max(rows[one].fitness or 0.0 for one in row.parents) for row in mine if row.parents
        ]
        assert (each.individuals, each.bests) == (len(mine), sum(row.index in bests for row in mine))
        if len(gains) > 1:
            assert (each.children, each.better) == (len(gains), sum(gain > 0 for gain in gains))
            interval = ttest_1samp(gains, 0).confidence_interval(0.95)
            assert (each.gain, each.low, each.high) == pytest.approx((np.mean(gains), interval.low, interval.high))
    assert any(each.children for each in found) and any(not each.children for each in found)
