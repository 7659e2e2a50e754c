"""Whole searches for mixing matrices on a tiny dense model, in this process: run, repeated, resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from dense_lab import check_repeated_and_resumed, dense_run, population, search

from moevolve.search.config.run import RunConfig
from moevolve.search.running.launch import register
from moevolve.search.running.set_up import set_up
from moevolve.store.repository import Store

GENOME = {"kind": "nanomoe", "variant": "II", "blocks": 4, "rank": 3, "fit": 3}


@pytest.fixture(scope="module")
def run(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    # With other seeds, no more than three different scores are found.
    return dense_run(tiny, tmp_path_factory.mktemp("dense"), GENOME, "mixed").model_copy(update={"seed": 10})


def searched(run: RunConfig, database: Path) -> list[tuple[Any, ...]]:
    """The population of a whole search."""
    with Store.open(f"sqlite:///{database}") as store:
        setup = set_up(run, f"{run.name}-1")
        register(setup, store)
        search(setup, store)
        return population(store, f"{run.name}-1")


def test_a_search_is_repeated_and_resumed_bit_for_bit(run: RunConfig, tmp_path: Path) -> None:
    check_repeated_and_resumed(run, tmp_path)


def test_plain_low_rank_is_evaluated_once_as_a_baseline(run: RunConfig, tmp_path: Path) -> None:
    low_rank = run.genome.model_copy(update={"variant": "low_rank"})
    rows = searched(run.model_copy(update={"genome": low_rank}), tmp_path / "baseline.db")
    assert len({row[4] for row in rows}) == len({row[5] for row in rows}) == 1
    plain = run.genome.model_copy(update={"fit": 0, "variant": "I"})
    start = searched(run.model_copy(update={"genome": plain}), tmp_path / "plain.db")[0]
    assert start[5] == rows[0][5]
