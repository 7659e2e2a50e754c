"""Searches and individuals by name, and their lineage: recursive queries over the parents, rendered for Graphviz."""

from __future__ import annotations

import re
from typing import Any

from sqlalchemy import BigInteger, Column, Connection, Row, cast, func, literal, select

from moevolve.evaluators.errors import suggestion
from moevolve.store.errors import NotFoundError, StoreError
from moevolve.store.records import SEARCH_COLUMNS, LineageGraph, LineageNode, SearchRecord
from moevolve.store.scales import scales_of
from moevolve.store.tables import individuals, parents, searches

_INDEX = re.compile(r"[0-9]{1,18}")  # fits a column of 64 bits


def find_search(connection: Connection, name_or_id: str) -> SearchRecord:
    """The search with this id or name.

    Raises:
        NotFoundError: There is none; the message suggests similar names.
    """
    match = (searches.c.id == name_or_id) | (searches.c.name == name_or_id)
    row = connection.execute(select(*(searches.c[name] for name in SEARCH_COLUMNS)).where(match)).first()
    if row is None:
        names = connection.execute(select(searches.c.name)).scalars()
        raise NotFoundError(f"no search {name_or_id!r}: {suggestion(name_or_id, names)}")
    return SearchRecord(**row._mapping)


def find_individual(connection: Connection, ref: str) -> tuple[SearchRecord, Row[Any]]:
    """The search and the row of the individual `SEARCH:INDEX`; NotFoundError if there is none."""
    name, colon, number = ref.rpartition(":")
    if not colon or not name or not _INDEX.fullmatch(number):
        raise NotFoundError(f"{ref!r} names no individual: write SEARCH:INDEX, such as rte-8x7b:41")
    search = find_search(connection, name)
    idx = int(number)
    mine = individuals.c.search_id == search.id
    row = connection.execute(select(individuals).where(mine, individuals.c.idx == idx)).first()
    if row is None:
        below = select(func.max(individuals.c.idx)).where(mine, individuals.c.idx < idx)
        above = select(func.min(individuals.c.idx)).where(mine, individuals.c.idx > idx)
        near = [connection.execute(query).scalar() for query in (below, above)]
        names = [f"{search.name}:{found}" for found in near if found is not None]
        hint = f"nearest: {', '.join(names)}" if names else "the search has no individuals yet"
        raise NotFoundError(f"no individual {ref!r}; {hint}")
    return search, row


def read_ancestors(connection: Connection, ref: str, max_depth: int | None = None) -> LineageGraph:
    """The individual `SEARCH:INDEX` and its ancestors, at most `max_depth` generations back."""
    return _lineage(connection, ref, max_depth, parents.c.child_idx, parents.c.parent_idx)


def read_descendants(connection: Connection, ref: str, max_depth: int | None = None) -> LineageGraph:
    """The individual `SEARCH:INDEX` and its descendants, at most `max_depth` generations on."""
    return _lineage(connection, ref, max_depth, parents.c.parent_idx, parents.c.child_idx)


def _lineage(
    connection: Connection, ref: str, max_depth: int | None, here: Column[Any], there: Column[Any]
) -> LineageGraph:
    """The individual `SEARCH:INDEX` with those that edges lead to, from the column `here` to the column `there`."""
    if max_depth is not None and max_depth < 0:
        raise StoreError(f"the depth of a lineage is 0 or more generations, got {max_depth}")
    search, row = find_individual(connection, ref)
    first = cast(literal(row.idx), BigInteger)
    # The distance is a column only if it is limited: without it, UNION drops a node reached by several paths.
    if max_depth is None:
        walk = select(first.label("idx")).cte("walk", recursive=True)
        step: Any = select(there).where(parents.c.search_id == search.id, here == walk.c.idx)
    else:
        walk = select(first.label("idx"), literal(0).label("distance")).cte("walk", recursive=True)
        step = select(there, walk.c.distance + 1).where(
            parents.c.search_id == search.id, here == walk.c.idx, walk.c.distance < max_depth
        )
    members = select(walk.union(step).c.idx).distinct().subquery()
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
    scale = scales_of(connection, search.id).fitness
    return LineageGraph(search.id, search.name, row.idx, graph_nodes, tuple(sorted(pairs)), scale)


def to_dot(graph: LineageGraph) -> str:
    """The graph as Graphviz text with parents above children, for `dot -Tsvg`."""
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
