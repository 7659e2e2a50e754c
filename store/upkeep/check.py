"""Looking a store through for what only damage, a fault of this software or a hand in the database can have done."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any

from sqlalchemy import Connection, ForeignKeyConstraint, Row, Select, and_, func, select, text

from moevolve.store.errors import StoreError
from moevolve.store.reader import StoreReader
from moevolve.store.records import SearchRecord
from moevolve.store.schema import newest_revision
from moevolve.store.session import one_line
from moevolve.store.tables import Base, calibrations, contexts, evaluations, individuals, leases, search_tasks, searches
from moevolve.store.upkeep.pages import edges, evaluations_of, pages

LISTED = 1_000
"""Problems that are listed at most; all are counted."""
_ROUNDING = 1e-9
"""Between a fitness and the same one computed anew."""

_COUNTED = (searches, individuals, evaluations, calibrations)

Reader = Callable[[bytes], tuple[str, float]]
"""Content hash of a serialised genome, and what the search takes off its score; an error says why it can't be read."""


@dataclass(frozen=True, slots=True)
class Checked:
    """What a store holds, and what is wrong with it.

    Attributes:
        revision: of its schema.
        searches, individuals, evaluations, calibrations: how many there are; 0 where that is damaged.
        bytes: that the database takes on its disk.
        unread: names of the searches whose genomes could not be looked into, as their model's configuration isn't here.
        problems: one line each, at most `LISTED`.
        found: problems in all.
    """

    revision: str
    searches: int
    individuals: int
    evaluations: int
    calibrations: int
    bytes: int
    unread: tuple[str, ...]
    problems: tuple[str, ...]
    found: int


class _Problems:
    def __init__(self) -> None:
        self.listed: list[str] = []
        self.found = 0

    def gather(self, store: StoreReader, where: str, find: Callable[[Connection], Iterator[str]]) -> None:
        """All that is found in one transaction; what can't be read is a problem, too."""
        try:
            with store.transaction() as connection:
                for problem in find(connection):
                    self._add(problem)
        except StoreError as error:
            self._add(f"{where}{error}")

    def _add(self, problem: str) -> None:
        self.found += 1
        if len(self.listed) < LISTED:
            self.listed.append(problem)


def check(store: StoreReader, reader_of: Callable[[SearchRecord], Reader | None]) -> Checked:
    """Looks a whole store through; a driver may go on writing to it.

    Args:
        store: the store.
        reader_of: how genomes of a search are read; None if that can't be known here, which leaves out their hashes.
    """
    problems, unread, size = _Problems(), list[str](), list[int]()
    counts = dict.fromkeys((table.name for table in _COUNTED), 0)

    def count(connection: Connection) -> Iterator[str]:
        size.append(_bytes(connection))
        for table in _COUNTED:
            counts[table.name] = int(connection.execute(select(func.count()).select_from(table)).scalar_one())
        yield from _dangling(connection)

    problems.gather(store, "", _integrity)
    problems.gather(store, "", count)
    for summary in store.searches():
        search = summary.search
        reader = reader_of(search)
        if reader is None and summary.individuals:
            unread.append(search.name)
        problems.gather(store, f"{search.name}: ", partial(_of_search, search=search, reader=reader))
    return Checked(
        revision=newest_revision(),
        bytes=sum(size),
        unread=tuple(unread),
        problems=tuple(problems.listed),
        found=problems.found,
        **counts,
    )


def _bytes(connection: Connection) -> int:
    if connection.dialect.name == "postgresql":
        return int(connection.execute(text("SELECT pg_database_size(current_database())")).scalar_one())
    pages_in, each = (connection.execute(text(f"PRAGMA {name}")).scalar_one() for name in ("page_count", "page_size"))
    return int(pages_in * each)


def _integrity(connection: Connection) -> Iterator[str]:
    """What SQLite itself finds; PostgreSQL has no such test that users may run."""
    if connection.dialect.name == "sqlite":
        lines = connection.execute(text(f"PRAGMA integrity_check({LISTED})")).scalars()
        yield from (f"SQLite: {line}" for line in lines if line != "ok")


def _dangling(connection: Connection) -> Iterator[str]:
    """Rows that belong to rows which aren't there: databases refuse them, unless told not to look."""
    for table in Base.metadata.sorted_tables:
        for key in sorted(table.foreign_key_constraints, key=lambda key: str(key.name)):
            count = connection.execute(_without_target(key)).scalar_one()
            if count:
                yield f"{table.name}: {count:,} rows belong to {key.referred_table.name} that aren't there"
    alone = select(searches.c.name).where(~searches.c.id.in_(select(leases.c.search_id)))
    yield from (f"{name}: it has no row in leases" for name in connection.execute(alone).scalars())


def _without_target(key: ForeignKeyConstraint) -> Select[Any]:
    target = key.referred_table.alias()
    same = and_(*(element.parent == target.c[element.column.name] for element in key.elements))
    query = select(func.count()).select_from(key.table.outerjoin(target, same))
    return query.where(target.c[key.elements[0].column.name].is_(None))


def _of_search(connection: Connection, search: SearchRecord, reader: Reader | None) -> Iterator[str]:
    scores, expected = _Scores(connection, search), 0
    for page in pages(connection, search.id, *(() if reader else ("genome",))):
        scores.read(page)
        for row in page:
            if row.idx != expected:
                yield f"{search.name}: individuals {expected} to {row.idx - 1} are missing"
            expected = row.idx + 1
            penalty, problems = _genome(reader, row)
            yield from (
                f"{search.name}:{row.idx}: {problem}" for problem in (*problems, *scores.problems(row, penalty))
            )
        for child, own in groupby(edges(connection, page), key=lambda edge: edge.child_idx):
            given = [(edge.position, edge.parent_idx) for edge in own]
            if [position for position, _ in given] != list(range(len(given))):
                yield f"{search.name}:{child}: a parent is missing"
            late = [parent for _, parent in given if parent >= child]
            yield from (f"{search.name}:{child}: its parent {parent} is not earlier" for parent in late)


def _genome(reader: Reader | None, row: Row[Any]) -> tuple[float | None, list[str]]:
    """What a genome costs its score, None if that isn't known; and what is wrong with it."""
    if reader is None:
        return None, []
    try:
        content, penalty = reader(row.genome)
    except Exception as error:  # noqa: BLE001  whatever readers of bytes raise, the bytes are at fault
        return None, [f"its genome can't be read: {one_line(error)}"]
    return penalty, [] if content == row.content_hash else ["its genome is not the one that its content hash is of"]


class _Scores:
    """What a search's individuals scored, page by page, on what makes their fitness."""

    def __init__(self, connection: Connection, search: SearchRecord) -> None:
        t, c = search_tasks.c, contexts.c
        mine = (t.search_id == search.id, t.split == "search", t.weight > 0)
        same = and_(
            c.task_fingerprint == t.task_fingerprint,
            c.model_fingerprint == search.model_fingerprint,
            c.engine_fingerprint == search.engine_fingerprint,
        )
        query = select(t.task, t.weight, c.id).select_from(search_tasks.outerjoin(contexts, same))
        self._tasks = connection.execute(query.where(*mine).order_by(t.position)).all()
        self._connection = connection
        self._found: list[Mapping[str, Row[Any]]] = []

    def read(self, page: Sequence[Row[Any]]) -> None:
        """All that there is for a page."""
        hashes = sorted({row.phenotype_hash for row in page})
        self._found = [
            {} if task.id is None else evaluations_of(self._connection, task.id, hashes) for task in self._tasks
        ]

    def problems(self, row: Row[Any], penalty: float | None) -> Iterator[str]:
        """What is wrong with an individual's status and fitness; a penalty that isn't known may be any."""
        if row.status != "ok" and row.fitness is not None:
            yield f"it is {row.status}, and has a fitness"
        if row.status != "ok" or not self._tasks:
            return
        records = [found.get(row.phenotype_hash) for found in self._found]
        scores = [None if record is None else record.score for record in records]
        lacking = [task.task for task, score in zip(self._tasks, scores, strict=True) if score is None]
        yield from (f"it has a fitness, and no score on {task}" for task in lacking)
        if lacking or row.fitness is None:
            return
        weights = [task.weight for task in self._tasks]
        mean = sum(weight * (score or 0.0) for weight, score in zip(weights, scores, strict=True)) / sum(weights)
        off = row.fitness + (penalty or 0.0) - mean
        if off > _ROUNDING or (penalty is not None and off < -_ROUNDING):
            yield f"its fitness is {row.fitness}, its scores make {mean - (penalty or 0.0)}"
