"""Searches and individuals by name, and their lineage: queries over the parents."""

from __future__ import annotations

import re
from typing import Any

from sqlalchemy import BigInteger, Connection, Row, Select, cast, func, literal, select

from moevolve.evaluators.errors import suggestion
from moevolve.store.errors import NotFoundError
from moevolve.store.records import SEARCH_COLUMNS, LineageGraph, LineageNode, SearchRecord
from moevolve.store.scales import scales_of
from moevolve.store.tables import individuals, parents, searches

_INDEX = re.compile(r"[0-9]{1,18}")  # fits a column of 64 bits


def find_search(connection: Connection, name_or_id: str) -> SearchRecord:
    """Return the search with this id or name.

    Raises:
        NotFoundError: There is none; the message suggests similar names.
    """
    match = (searches.c.id == name_or_id) | (searches.c.name == name_or_id)
    row = connection.execute(select(*(searches.c[name] for name in SEARCH_COLUMNS)).where(match)).first()
    if row is None:
        names = connection.execute(select(searches.c.name)).scalars()
        raise NotFoundError(f"no search {name_or_id!r}: {suggestion(name_or_id, names)}")
    return SearchRecord(**row._mapping)


def find_individual(connection: Connection, ref: str) -> tuple[SearchRecord, Row[*tuple[object, ...]]]:
    """Return the search and the row of the individual `SEARCH:INDEX`; raise NotFoundError without one."""
    name, colon, number = ref.rpartition(":")
    if not colon or not name or not _INDEX.fullmatch(number):
        raise NotFoundError(f"{ref!r} names no individual: write SEARCH:INDEX, such as rte-8x7b:41")
    search = find_search(connection, name)
    idx = int(number)
    mine = individuals.c.search_id == search.id
    row = connection.execute(select(individuals).where(mine, individuals.c.idx == idx)).first()
    if row is None:
        below = select(func.max(individuals.c.idx, type_=BigInteger)).where(mine, individuals.c.idx < idx)
        above = select(func.min(individuals.c.idx, type_=BigInteger)).where(mine, individuals.c.idx > idx)
        near = [connection.execute(query).scalar() for query in (below, above)]
        names = [f"{search.name}:{found}" for found in near if found is not None]
        hint = f"nearest: {', '.join(names)}" if names else "the search has no individuals yet"
        raise NotFoundError(f"no individual {ref!r}; {hint}")
    return search, row


def read_ancestors(connection: Connection, ref: str) -> LineageGraph:
    """Return the individual `SEARCH:INDEX` and its ancestors."""
    search, row = find_individual(connection, ref)
    walk = select(cast(literal(row.idx), BigInteger).label("idx")).cte("walk", recursive=True)
    # UNION drops a node that several paths reach.
    step = select(parents.c.parent_idx).where(parents.c.search_id == search.id, parents.c.child_idx == walk.c.idx)
    members = select(walk.union(step).c.idx).subquery()
    edges = connection.execute(
        select(parents.c.parent_idx, parents.c.child_idx)
        .join(members, members.c.idx == parents.c.child_idx)
        .where(parents.c.search_id == search.id)
        .distinct()
        .order_by(parents.c.parent_idx, parents.c.child_idx)
    )
    nodes = connection.execute(
        _nodes(search).join(members, members.c.idx == individuals.c.idx).order_by(individuals.c.idx)
    )
    scale = scales_of(connection, search.id).fitness
    pairs = tuple((parent, child) for parent, child in edges)
    return LineageGraph(search.id, search.name, row.idx, tuple(LineageNode(*node) for node in nodes), pairs, scale)


def read_children(connection: Connection, ref: str) -> list[LineageNode]:
    """Return the children of the individual `SEARCH:INDEX`, by index."""
    search, row = find_individual(connection, ref)
    born = select(parents.c.child_idx).where(parents.c.search_id == search.id, parents.c.parent_idx == row.idx)
    query = _nodes(search).where(individuals.c.idx.in_(born)).order_by(individuals.c.idx)
    return [LineageNode(*node) for node in connection.execute(query)]


def _nodes(search: SearchRecord) -> Select[Any]:
    i = individuals.c
    columns = select(i.idx, i.depth, i.phase, i.operator, i.status, i.fitness, i.summary)
    return columns.where(i.search_id == search.id)
