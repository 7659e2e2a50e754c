"""A whole search for a division of a tiny dense model, in this process: calibrated, run, repeated, resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from dense_lab import check_repeated_and_resumed, dense_run, search
from local_workers import local_pool

from moevolve.search.config.run import RunConfig
from moevolve.search.operations.subject import find_subject
from moevolve.search.running.calibration import calibrated_setup
from moevolve.search.running.launch import register
from moevolve.search.running.set_up import set_up
from moevolve.store.repository import Store


@pytest.fixture(scope="module")
def run(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    genome = {"kind": "factorllm", "experts": 4, "active": 1, "components": 4, "calibration_tokens": 300}
    return dense_run(tiny, tmp_path_factory.mktemp("dense"), genome, "divided")


def test_a_search_is_repeated_and_resumed_bit_for_bit(run: RunConfig, tmp_path: Path) -> None:
    check_repeated_and_resumed(run, tmp_path)


def test_a_stored_individual_is_expressed_from_the_stored_calibration(run: RunConfig, tmp_path: Path) -> None:
    with Store.open(f"sqlite:///{tmp_path / 'store.db'}") as store:
        setup = set_up(run, "divided-1")
        register(setup, store)
        search(calibrated_setup(setup, store, local_pool(setup).calibrate), store)
        for reference in ("divided:0", "divided:15"):
            subject = find_subject(store, reference)
            assert subject.detail is not None
            assert subject.edit.phenotype_hash == subject.detail.individual.phenotype_hash
