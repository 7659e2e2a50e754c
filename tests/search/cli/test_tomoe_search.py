"""A whole search for masks on a tiny dense model, in this process: calibrated, run, repeated, resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from dense_lab import check_repeated_and_resumed, dense_run, search
from local_workers import local_pool

from moevolve.search.config.run import RunConfig
from moevolve.search.loop.scores import weighted_means
from moevolve.search.operations.subject import find_subject
from moevolve.search.running.calibration import calibrated_setup
from moevolve.search.running.launch import register
from moevolve.search.running.set_up import set_up
from moevolve.store.repository import Store

GENOME = {"kind": "tomoe", "experts": 4, "components": 4, "latent": 4, "calibration_tokens": 300}


@pytest.fixture(scope="module")
def run(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    genome = GENOME | {"coverage": 0.2, "balance": 0.1}
    return dense_run(tiny, tmp_path_factory.mktemp("dense"), genome, "masked")


def test_a_search_is_repeated_and_resumed_bit_for_bit(run: RunConfig, tmp_path: Path) -> None:
    check_repeated_and_resumed(run, tmp_path)


def test_the_terms_are_taken_off_the_score(run: RunConfig, tmp_path: Path) -> None:
    with Store.open(f"sqlite:///{tmp_path / 'store.db'}") as store:
        setup = set_up(run, "masked-1")
        register(setup, store)
        setup = calibrated_setup(setup, store, local_pool(setup).calibrate)
        search(setup, store)
        tasks = [split.fingerprint for split in setup.splits("search")]
        penalties = []
        for row in store.history("masked-1"):
            genome = setup.space.from_bytes(row.genome)
            subject = find_subject(store, f"masked:{row.index}")
            assert subject.edit.phenotype_hash == row.phenotype_hash == genome.express().phenotype_hash
            (search_record,) = store.searches()
            records = store.evaluations(
                row.phenotype_hash, setup.facts.fingerprint, search_record.search.engine_fingerprint, tasks
            )
            penalties.append(setup.space.describe(genome).penalty)
            assert row.fitness == pytest.approx(weighted_means(tuple(records), setup.weights)[0] - penalties[-1])
        assert len(set(penalties)) > 10 and min(penalties) > 0
