"""A search's individuals a few hundred at a time, however many they are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, Row, select

from moevolve.store.session import CHUNK
from moevolve.store.tables import evaluations, individuals, parents


def pages(connection: Connection, search_id: str, *without: str) -> Iterator[Sequence[Row[Any]]]:
    """Rows of individuals by index, `CHUNK` at a time, without some of their columns."""
    columns = [column for column in individuals.c if column.name not in without]
    query = select(*columns).where(individuals.c.search_id == search_id).order_by(individuals.c.idx).limit(CHUNK)
    page = connection.execute(query).all()
    while page:
        yield page
        page = connection.execute(query.where(individuals.c.idx > page[-1].idx)).all()


def edges(connection: Connection, page: Sequence[Row[Any]]) -> Sequence[Row[Any]]:
    """Rows of the parents of a page's individuals, by child and position."""
    p = parents.c
    own = (p.search_id == page[0].search_id, p.child_idx >= page[0].idx, p.child_idx <= page[-1].idx)
    return connection.execute(select(parents).where(*own).order_by(p.child_idx, p.position)).all()


def evaluations_of(connection: Connection, context_id: int, hashes: Sequence[str]) -> Mapping[str, Row[Any]]:
    """Rows of the evaluations of at most `CHUNK` phenotypes in a context, by phenotype hash."""
    e = evaluations.c
    query = select(evaluations).where(e.context_id == context_id, e.phenotype_hash.in_(hashes))
    return {row.phenotype_hash: row for row in connection.execute(query)}
