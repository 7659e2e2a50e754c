"""Ancestors and children."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from store_samples import individual, search, split

from moevolve.store.errors import StoreError
from moevolve.store.repository import Store
from moevolve.store.upkeep.check import check

FAMILY = {0: (), 1: (), 2: (0, 1), 3: (2, 0), 4: (2,), 5: (3, 4), 6: (1,)}


@pytest.fixture
def family(store: Store) -> Store:
    for name in ("alpha", "beta"):
        store.create_search(search(name), [split()])
        store.record(f"id-{name}", [individual(index, parents) for index, parents in FAMILY.items()])
    return store


def test_ancestors_and_children(family: Store) -> None:
    for index, members in {5: [0, 1, 2, 3, 4, 5], 4: [0, 1, 2, 4], 6: [1, 6], 0: [0]}.items():
        graph = family.ancestors(f"alpha:{index}")
        assert [node.index for node in graph.nodes] == members
        assert graph.edges == tuple(sorted((p, c) for c in members for p in FAMILY[c]))
        assert (graph.root, graph.search_name) == (index, "alpha")
        assert [node.index for node in family.children(f"alpha:{index}")] == [c for c in FAMILY if index in FAMILY[c]]
    with pytest.raises(StoreError, match="alpha:9"):
        family.ancestors("alpha:9")


def test_a_line_that_damage_leads_in_a_circle_ends(tmp_path: Path) -> None:
    with Store.open(f"sqlite:///{tmp_path / 'store.db'}") as store:
        store.create_search(search(), [split()])
        store.record("id-alpha", [individual(index, parents) for index, parents in FAMILY.items()])
        with closing(sqlite3.connect(tmp_path / "store.db")) as plain:
            plain.execute("PRAGMA ignore_check_constraints=ON")
            plain.execute("UPDATE parents SET parent_idx = 5 WHERE child_idx IN (2, 5)")
            plain.commit()
        graph = store.ancestors("alpha:5")
        assert [node.index for node in graph.main_line] == [5]
        assert any("parents" in problem for problem in check(store).problems)


def test_long_lines_of_crossed_descent_end(store: Store) -> None:
    """Two parents each for 1,100 generations: more paths than anybody could walk, and deeper than Python calls go."""
    store.create_search(search(), [split()])
    batch = [individual(i, [p for p in (i - 1, i - 2) if p >= 0], depth=i) for i in range(1_100)]
    store.record("id-alpha", batch)
    assert len(store.ancestors("alpha:1099").nodes) == 1_100
