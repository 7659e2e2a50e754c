"""What listings call the parts that individuals of different kinds consist of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from store_samples import decided, evaluation, individual, search, split

from moevolve.search.genomes.registry import KINDS, part_names
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


def heading(in_process: Any, *arguments: str) -> str:
    done = in_process(*arguments)
    assert done.returncode == 0, done.stderr
    return str(done.stdout.splitlines()[1])


def test_best_counts_what_there_is(store: str, in_process: Any) -> None:
    for kind in KINDS:
        shown = heading(in_process, "best", "--store", store, "--search", f"a-{kind}")
        assert ("experts" in shown, "blocks" in shown) == (kind != "nanomoe", kind == "nanomoe")
    assert "experts or blocks" in heading(in_process, "best", "--store", store)


def test_parts_are_named_once() -> None:
    assert part_names(["tomoe", "eep"]) == "experts"
    assert part_names(["nanomoe", "eep"]) == "experts or blocks"
    assert part_names(["nanomoe"]) == "blocks"
