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


def test_what_the_letters_of_a_genome_mean_is_said(tmp_path: Path, in_process: Any) -> None:
    url = f"sqlite:///{tmp_path / 'letters.db'}"
    with Store.open(url) as opened:
        opened.create_search(search(), [split()])
        for index, kept in enumerate(("keep 4dek", "keep 8 of 64, 2 groups")):
            one = individual(index, phenotype=index, summary=kept)
            opened.record("id-alpha", [decided(one, 0.5)], [evaluation(index, 0.5)])
    legend = "keep: the experts that every group of layers keeps, 0 to 9 and then a to z"
    assert legend in in_process("best", "--store", url).stdout
    with Store.open(url) as opened, opened.write_transaction() as connection:
        connection.exec_driver_sql("UPDATE individuals SET summary = 'keep 8 of 64, 2 groups'")
    assert legend not in in_process("best", "--store", url).stdout
