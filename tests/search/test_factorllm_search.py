"""A whole search for a division of a tiny dense model, in this process: calibrated, run, repeated, resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from dense_lab import calibrate, dense_run, population, search

from moevolve.search.calibrating import calibrated_plan
from moevolve.search.config import RunConfig
from moevolve.search.evaluation import find_subject
from moevolve.search.service import make_plan, register
from moevolve.store.repository import Store


@pytest.fixture(scope="module")
def run(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    genome = {"kind": "factorllm", "experts": 4, "active": 1, "components": 4, "calibration_tokens": 300}
    return dense_run(tiny, tmp_path_factory.mktemp("dense"), genome, "divided")


def test_a_search_is_repeated_and_resumed_bit_for_bit(run: RunConfig, tmp_path: Path) -> None:
    found = []
    # A store each, so that no evaluation is reused.
    for name, stop in (("whole", None), ("interrupted", 11)):
        with Store.open(f"sqlite:///{tmp_path / name}.db") as store:
            plan = make_plan(run, "divided-1")
            register(plan, store)
            plan = calibrated_plan(plan, store, calibrate)
            if stop is not None:
                with pytest.raises(KeyboardInterrupt):
                    search(plan, store, stop)
                plan = calibrated_plan(make_plan(run, "divided-1"), store, _never)
            search(plan, store)
            found.append(population(store, "divided-1"))
    assert found[0] == found[1]
    assert len(found[0]) == 30
    assert found[0][0][1] == "start" and [row[1] for row in found[0][1:8]] == ["random"] * 7
    assert {row[1] for row in found[0][8:]} <= {"mutation", "crossover+mutation"}
    fitness = [row[5] for row in found[0]]
    assert len(set(fitness)) > 3 and max(fitness) > fitness[0]


def _never(*arguments: Any) -> bytes:
    raise AssertionError("the calibration is stored")


def test_a_stored_individual_is_expressed_from_the_stored_calibration(run: RunConfig, tmp_path: Path) -> None:
    with Store.open(f"sqlite:///{tmp_path / 'store.db'}") as store:
        plan = make_plan(run, "divided-1")
        register(plan, store)
        search(calibrated_plan(plan, store, calibrate), store)
        for reference in ("divided:0", "divided:29"):
            subject = find_subject(store, reference)
            assert subject.detail is not None
            assert subject.edit.phenotype_hash == subject.detail.individual.phenotype_hash
