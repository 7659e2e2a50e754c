"""Ancestors and children."""

from __future__ import annotations

import pytest
from store_samples import individual, search, split

from moevolve.store.errors import StoreError
from moevolve.store.repository import Store

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


def test_long_lines_of_crossed_descent_end(store: Store) -> None:
    """Two parents each for 1,100 generations: more paths than anybody could walk, and deeper than Python calls go."""
    store.create_search(search(), [split()])
    batch = [individual(i, [p for p in (i - 1, i - 2) if p >= 0], depth=i) for i in range(1_100)]
    store.record("id-alpha", batch)
    assert len(store.ancestors("alpha:1099").nodes) == 1_100
