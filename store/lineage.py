"""Who descends from whom: recursive queries over the parents, and their rendering as Graphviz text."""

from __future__ import annotations

from typing import Any, Literal

from sqlalchemy import CTE, BigInteger, Connection, cast, literal, select

from moevolve.store.answers import LineageGraph, LineageNode
from moevolve.store.errors import StoreError
from moevolve.store.models import individuals, parents
from moevolve.store.refs import find_individual

Direction = Literal["ancestors", "descendants"]


def lineage(connection: Connection, ref: str, direction: Direction, max_depth: int | None) -> LineageGraph:
    """The individual `ref` with all its ancestors or descendants, at most `max_depth` generations away.

    Raises:
        StoreError: unknown reference or a negative depth.
    """
    if max_depth is not None and max_depth < 0:
        raise StoreError(f"the depth of a lineage is 0 or more generations, got {max_depth}")
    search, row = find_individual(connection, ref)
    reached = _reached(search.id, row.idx, direction, max_depth)
    members = select(reached.c.idx).distinct().subquery()
    i = individuals.c
    nodes = connection.execute(
        select(i.idx, i.depth, i.phase, i.operator, i.status, i.fitness, i.summary)
        .join(members, members.c.idx == i.idx)
        .where(i.search_id == search.id)
        .order_by(i.idx)
    )
    graph_nodes = tuple(LineageNode(*node) for node in nodes)
    inside = {node.index for node in graph_nodes}
    edges = connection.execute(
        select(parents.c.parent_idx, parents.c.child_idx)
        .join(members, members.c.idx == parents.c.child_idx)
        .where(parents.c.search_id == search.id)
    )
    pairs = {(parent, child) for parent, child in edges if parent in inside}
    return LineageGraph(search.id, search.name, row.idx, graph_nodes, tuple(sorted(pairs)))


def _reached(search_id: str, start: int, direction: Direction, max_depth: int | None) -> CTE:
    """Indices reached from `start`. Without a limit no distance is kept: a node joins once, not per path."""
    here, there = parents.c.child_idx, parents.c.parent_idx
    if direction == "descendants":
        here, there = there, here
    first = cast(literal(start), BigInteger)
    if max_depth is None:
        walk = select(first.label("idx")).cte("walk", recursive=True)
        step: Any = select(there).where(parents.c.search_id == search_id, here == walk.c.idx)
    else:
        walk = select(first.label("idx"), literal(0).label("distance")).cte("walk", recursive=True)
        step = select(there, walk.c.distance + 1).where(
            parents.c.search_id == search_id, here == walk.c.idx, walk.c.distance < max_depth
        )
    return walk.union(step)


def to_dot(graph: LineageGraph) -> str:
    """The graph as Graphviz text, parents above children: `dot -Tsvg` draws it."""
    lines = [f"digraph {_quote(graph.search_name)} {{", "  rankdir=TB;", '  node [shape=box, fontname="sans-serif"];']
    for node in graph.nodes:
        value = "-" if node.fitness is None else f"{node.fitness:.4f}"
        label = f"{node.index} {node.phase}\n{node.operator}\n{value if node.status == 'ok' else node.status}"
        style = {"ok": "solid", "failed": "dashed", "pending": "dotted"}[node.status]
        bold = ", penwidth=3" if node.index == graph.root else ""
        lines.append(f"  {node.index} [label={_quote(label)}, style={style}{bold}];")
    lines += [f"  {parent} -> {child};" for parent, child in graph.edges]
    return "\n".join([*lines, "}", ""])


def _quote(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'
