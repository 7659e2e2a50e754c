"""Listings of searches and individuals, as tables and as CSV."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from store_samples import decided, evaluation, individual, search, split

from moevolve.search.genomes.registry import KINDS
from moevolve.store.repository import Store


@pytest.fixture
def store(tmp_path: Path) -> str:
    """Of one evaluated individual of every kind, each of a phenotype of its own."""
    url = f"sqlite:///{tmp_path / 'kinds.db'}"
    with Store.open(url) as opened:
        for place, kind in enumerate(KINDS):
            opened.create_search(search(f"a-{kind}", genome_kind=kind), [split()])
            opened.record(f"id-a-{kind}", [decided(individual(0, phenotype=place), 0.5)], [evaluation(place, 0.5)])
    return url


def test_searches_are_filtered_and_compared(store: str, in_process: Any) -> None:
    def run(*arguments: str) -> str:
        done = in_process(*arguments, "--store", store)
        assert done.returncode == 0, done.stderr
        return str(done.stdout)

    rows = json.loads(run("searches", "--text", "A-EEP", "--json"))
    assert [row["search"]["name"] for row in rows] == ["a-eep"]
    shown = run("compare", "a-eep", "a-nanomoe")
    assert "genome.kind" not in shown and shown.count("50.0") == 2
