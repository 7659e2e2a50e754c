"""Finding searches and individuals by what a user typed, with the nearest names when there is no such thing."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any

from sqlalchemy import Connection, Row, func, select

from moevolve.store.errors import StoreError
from moevolve.store.models import individuals, searches
from moevolve.store.records import SearchRecord


def nearest(word: str, known: Iterable[str]) -> str:
    """Half a sentence naming the known words nearest to `word`, or some of them, or saying that there are none."""
    names = sorted(set(known))
    if not names:
        return "the store has none yet"
    close = get_close_matches(word, names, n=3, cutoff=0.5)
    if close:
        return f"did you mean {' or '.join(close)}?"
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return f"there are {', '.join(names[:5])}{more}"


def find_search(connection: Connection, name_or_id: str) -> SearchRecord:
    """The search of this id or name.

    Raises:
        StoreError: there is none.
    """
    match = (searches.c.id == name_or_id) | (searches.c.name == name_or_id)
    row = connection.execute(select(searches).where(match)).first()
    if row is None:
        names = connection.execute(select(searches.c.name)).scalars()
        raise StoreError(f"no search {name_or_id!r}: {nearest(name_or_id, names)}")
    return SearchRecord(**row._mapping)


def find_individual(connection: Connection, ref: str) -> tuple[SearchRecord, Row[Any]]:
    """The search and the row of the individual `SEARCH:INDEX`.

    Raises:
        StoreError: the reference isn't of that form, or names nothing.
    """
    name, colon, number = ref.rpartition(":")
    if not colon or not name or not number.isdecimal():
        raise StoreError(f"{ref!r} names no individual: write SEARCH:INDEX, such as rte-8x7b:41")
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
        raise StoreError(f"no individual {ref!r}; {hint}")
    return search, row
