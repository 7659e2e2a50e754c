"""Whole searches on a tiny dense model, in this process: calibrated, run, repeated, resumed.

`test_set_aside` does the same with divisions into experts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from dense_lab import check_repeated_and_resumed, dense_run, population, search

from moevolve.search.config.run import RunConfig
from moevolve.search.loop.scores import weighted_means
from moevolve.search.operations.subject import find_subject
from moevolve.search.running.launch import register
from moevolve.search.running.resume import set_up_stored
from moevolve.search.running.set_up import set_up
from moevolve.store.repository import Store

MASKS = {"kind": "tomoe", "experts": 4, "components": 4, "latent": 4, "calibration_tokens": 300}
MIXED = {"kind": "nanomoe", "variant": "II", "blocks": 4, "rank": 3, "fit": 3}


def test_the_terms_of_masks_are_taken_off_the_score(tiny: Any, tmp_path: Path) -> None:
    check_repeated_and_resumed(dense_run(tiny, tmp_path, MASKS | {"coverage": 0.2, "balance": 0.1}, "masked"), tmp_path)
    with Store.open(f"sqlite:///{tmp_path / 'whole.db'}") as store:
        setup = set_up_stored(store, "masked")
        tasks = [split.fingerprint for split in setup.splits("search")]
        engine = store.search("masked").engine_fingerprint
        penalties = []
        for row in store.history("masked-1"):
            subject = find_subject(store, f"masked:{row.index}")
            assert subject.edit.phenotype_hash == row.phenotype_hash
            records = store.evaluations(row.phenotype_hash, setup.facts.fingerprint, engine, tasks)
            assert subject.genome is not None
            penalties.append(subject.space.describe(subject.genome).penalty)
            assert row.fitness == pytest.approx(weighted_means(tuple(records), setup.weights)[0] - penalties[-1])
        assert len(set(penalties)) > 10 and min(penalties) > 0


def test_plain_low_rank_is_evaluated_once_as_a_baseline_of_mixing(tiny: Any, tmp_path: Path) -> None:
    # With other seeds, no more than three different scores are found.
    run = dense_run(tiny, tmp_path, MIXED, "mixed").model_copy(update={"seed": 10})
    check_repeated_and_resumed(run, tmp_path)

    def searched(evaluations: int, **genome: Any) -> list[tuple[Any, ...]]:
        phases = [phase.model_copy(update={"evaluations": evaluations, "initial": 1}) for phase in run.phases]
        changed = {"phases": tuple(phases), "genome": run.genome.model_copy(update=genome)}
        return population_of(run.model_copy(update=changed), tmp_path / f"{genome['variant']}.db")

    rows = searched(4, variant="low_rank")
    assert len(rows) == 4 and len({row[4] for row in rows}) == len({row[5] for row in rows}) == 1
    assert searched(1, variant="I", fit=0)[0][5] == rows[0][5], "mixing starts from it"


def population_of(run: RunConfig, database: Path) -> list[tuple[Any, ...]]:
    with Store.open(f"sqlite:///{database}") as store:
        setup = set_up(run, f"{run.name}-1")
        register(setup, store)
        search(setup, store)
        return population(store, f"{run.name}-1")
