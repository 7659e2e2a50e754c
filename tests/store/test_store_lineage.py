"""Ancestors and descendants, and their drawing."""

from __future__ import annotations

import pytest
from store_samples import decided, individual, search, split

from moevolve.store.errors import StoreError
from moevolve.store.lineage import to_dot
from moevolve.store.repository import Store

FAMILY = {0: (), 1: (), 2: (0, 1), 3: (2, 0), 4: (2,), 5: (3, 4), 6: (1,)}


@pytest.fixture
def family(store: Store) -> Store:
    for name in ("alpha", "beta"):
        store.create_search(search(name), [split()])
        store.record(f"id-{name}", [individual(index, parents) for index, parents in FAMILY.items()])
    return store


def test_ancestors_and_descendants(family: Store) -> None:
    up: dict[tuple[int, int | None], list[int]] = {
        (5, None): [0, 1, 2, 3, 4, 5], (5, 1): [3, 4, 5], (5, 2): [0, 2, 3, 4, 5], (5, 0): [5], (6, None): [1, 6]
    }  # fmt: skip
    down = {(0, None): [0, 2, 3, 4, 5], (0, 1): [0, 2, 3], (1, None): [1, 2, 3, 4, 5, 6], (5, None): [5]}
    for expected, lineage in ((up, family.ancestors), (down, family.descendants)):
        for (index, depth), members in expected.items():
            graph = lineage(f"alpha:{index}", depth)
            assert [node.index for node in graph.nodes] == members
            assert graph.edges == tuple(sorted((p, c) for c in members for p in FAMILY[c] if p in members))
            assert (graph.root, graph.search_name) == (index, "alpha")
    with pytest.raises(StoreError, match="alpha:9"):
        family.ancestors("alpha:9")
    with pytest.raises(StoreError, match="0 or more"):
        family.descendants("alpha:1", -1)


def test_long_lines_of_crossed_descent_end(store: Store) -> None:
    """Two parents each for 1,100 generations: more paths than anybody could walk, and deeper than Python calls go."""
    store.create_search(search(), [split()])
    batch = [individual(i, [p for p in (i - 1, i - 2) if p >= 0], depth=i) for i in range(1_100)]
    store.record("id-alpha", batch)
    assert len(store.ancestors("alpha:1099").nodes) == 1_100
    assert len(store.descendants("alpha:0").nodes) == 1_100
    assert len(store.ancestors("alpha:1099", 10).nodes) == 21


def test_the_drawing_names_every_node_and_edge_and_escapes(store: Store) -> None:
    store.create_search(search('say "hi" \\'), [split()])
    batch = [individual(0, operator='a "quoted"\nname'), individual(1, [0]), individual(2, [0])]
    store.record('id-say "hi" \\', [decided(batch[0], 0.5), decided(batch[1], None), batch[2]])
    dot = to_dot(store.descendants('say "hi" \\:0'))
    assert dot.splitlines()[0] == 'digraph "say \\"hi\\" \\\\" {'
    assert '  0 [label="0 prune\\na \\"quoted\\"\\nname\\n0.5000", style=solid, penwidth=3];' in dot
    assert '  1 [label="1 prune\\nmutate\\nfailed", style=dashed];' in dot
    assert '  2 [label="2 prune\\nmutate\\npending", style=dotted];' in dot
    assert "  0 -> 1;" in dot and "  0 -> 2;" in dot
