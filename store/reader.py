"""`StoreReader`, the interface for code that only reads the store; `repository.py` has the one that also writes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from types import TracebackType
from typing import Concatenate, ParamSpec, Self, TypeVar

from sqlalchemy import Connection, Engine, func, select

from moevolve.store import leases
from moevolve.store import tables as models
from moevolve.store.costs import read_costs
from moevolve.store.errors import UnreachableError
from moevolve.store.events import read_events, read_hours, read_latest_events
from moevolve.store.lineage import find_search, read_ancestors, read_children
from moevolve.store.pareto import read_front, read_full_score
from moevolve.store.queries import (
    context_ids,
    read_best,
    read_best_of_search,
    read_evaluations,
    read_history,
    read_individual,
    read_page,
    read_searches,
)
from moevolve.store.records import EvaluationRecord, SearchTaskRecord, StoredShrink
from moevolve.store.scales import scales_of
from moevolve.store.schema import location, prepare
from moevolve.store.session import make_engine, transaction

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S", bound="StoreReader")


def retrying(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """Decorate an idempotent method of a store to be retried while the database is unreachable.

    After a lost connection it is unknown whether the transaction was committed. A repeated write finds its own rows and
    leaves them, or is refused because another driver has acquired the lease. Creating a search and acquiring a lease
    are not idempotent: the second time, the search exists or the lease is held.
    """

    @wraps(method)
    def retried(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
        pause = 0.05  # a connection that was cut comes back at once, a server that restarts within seconds
        while True:
            try:
                found = method(self, *args, **kwargs)
            except UnreachableError:
                now = time.monotonic()
                self._unreachable_since = now if self._unreachable_since is None else self._unreachable_since
                if now + pause - self._unreachable_since > self.retry_timeout_s:
                    raise
                time.sleep(pause)
                pause = min(2 * pause, 1.0)
            else:
                self._unreachable_since = None
                return found

    return retried


def reading(query: Callable[Concatenate[Connection, P], R]) -> Callable[Concatenate[StoreReader, P], R]:
    """Make a method of a store from a query, which runs in a transaction of its own."""

    @wraps(query)
    def method(self: StoreReader, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with self.transaction() as connection:
            return query(connection, *args, **kwargs)

    return retrying(method)


class StoreReader:
    """Reads searches, individuals, evaluations and lineage from one SQL database (SQLite or PostgreSQL).

    No method writes, and the database connection of a `StoreReader` refuses writes; its subclass `Store` also writes
    (`moevolve.store.repository`). Each method is one transaction, which sees one committed state. Readers and writers
    never block each other. Every error is a `StoreError` with a one-line message.

    A reader may be used from several threads. Use it as a context manager, or call `close()`.

    Attributes:
        retry_timeout_s: Seconds for which an operation is retried while the database is unreachable or another process
            writes to the file. Drivers set it.
    """

    def __init__(self, engine: Engine, url: str) -> None:
        self._engine = engine
        self.url = url
        self.is_new = False
        self.retry_timeout_s = 0.0
        self._unreachable_since: float | None = None

    @classmethod
    def open(cls, url: str) -> Self:
        """Open the store at `url` (`sqlite:///file.db`, `postgresql://user@host/name`), also while others write to it.

        Raises:
            StoreError: The URL is wrong, the database unreachable, the folder or the store missing, the database isn't
                a store of moevolve, or the store has another schema version.
        """
        return cls._prepared(make_engine(url, create=False, read_only=True), url, create=False)

    @classmethod
    def _prepared(cls, engine: Engine, url: str, create: bool) -> Self:
        store = cls(engine, url)
        try:
            store._prepare(create)
        except BaseException:
            store.close()
            raise
        return store

    @retrying
    def _prepare(self, create: bool) -> None:
        self.is_new = prepare(self._engine, create)

    @property
    def location(self) -> str:
        """The file of a SQLite store; the URL of others, without its password."""
        return location(self._engine)

    @property
    def is_file(self) -> bool:
        """Whether the store is a SQLite file, which only processes on one machine may share."""
        return self._engine.dialect.name == "sqlite"

    @contextmanager
    def transaction(self) -> Iterator[Connection]:
        """A transaction that reads; see `session.transaction`."""
        with transaction(self._engine) as connection:
            yield connection

    def close(self) -> None:
        """Close all connections. Closing twice is harmless."""
        self._engine.dispose()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    search = reading(find_search)
    searches = reading(read_searches)
    history = reading(read_history)
    page = reading(read_page)
    individual = reading(read_individual)
    best = reading(read_best)
    best_of_search = reading(read_best_of_search)
    pareto = reading(read_front)
    full_score = reading(read_full_score)
    ancestors = reading(read_ancestors)
    children = reading(read_children)
    hours = reading(read_hours)
    scales = reading(scales_of)
    costs = reading(read_costs)
    events = reading(read_events)
    latest_events = reading(read_latest_events)
    control = reading(leases.read)
    controls = reading(leases.read_all)
    running = reading(leases.running)

    @retrying
    def model_facts(self, search_id: str) -> str | None:
        """Return the facts of a search's model as JSON; None if it was stored without them."""
        s = models.searches.c
        with self.transaction() as connection:
            return connection.execute(select(s.model_facts).where(s.id == search_id)).scalar()

    @retrying
    def search_tasks(self, search_id: str, *, auxiliary: bool = False) -> list[SearchTaskRecord]:
        """The task splits in a search's fitness, in the config's order; with `auxiliary`, also those of weight 0."""
        t = models.search_tasks.c
        query = select(t.task, t.split, t.task_fingerprint, t.weight).where(t.search_id == search_id)
        query = (query if auxiliary else query.where(t.weight > 0)).order_by(t.position)
        with self.transaction() as connection:
            return [SearchTaskRecord(*row) for row in connection.execute(query)]

    @retrying
    def evaluations(
        self,
        phenotype_hashes: str | Sequence[str],
        model_fingerprint: str,
        engine_fingerprint: str,
        task_fingerprints: Sequence[str],
    ) -> list[EvaluationRecord]:
        """Return the evaluations, failed ones included, of some phenotypes on some task splits, sorted by both."""
        hashes = [phenotype_hashes] if isinstance(phenotype_hashes, str) else sorted(set(phenotype_hashes))
        with self.transaction() as connection:
            ids = context_ids(connection, model_fingerprint, engine_fingerprint, task_fingerprints)
            return read_evaluations(connection, ids, hashes)

    @retrying
    def fitness_by_index(self, search_id: str, first: int = 0) -> list[tuple[int, float]]:
        """Index and fitness of a search's individuals from `first` on that have a fitness, in no particular order."""
        i = models.individuals.c
        query = select(i.idx, i.fitness).where(i.search_id == search_id, i.status == "ok", i.idx >= first)
        if first == 0:  # indices have no gaps; a damaged one may be beyond all memory
            query = query.where(i.idx < select(func.count()).where(i.search_id == search_id).scalar_subquery())
        with self.transaction() as connection:
            return [(row.idx, row.fitness) for row in connection.execute(query)]

    @retrying
    def shrinks(self) -> list[StoredShrink]:
        """Return all shrinks, the one that changed last first."""
        s = models.shrinks.c
        query = select(s.name, s.searches, s.content, s.updated_at).order_by(s.updated_at.desc(), s.name)
        with self.transaction() as connection:
            return [StoredShrink(*row) for row in connection.execute(query)]

    @retrying
    def calibrations(self) -> list[str]:
        """Return the fingerprints of all calibrations."""
        c = models.calibrations.c
        with self.transaction() as connection:
            return list(connection.execute(select(c.fingerprint).order_by(c.fingerprint)).scalars())

    @retrying
    def calibration(self, fingerprint: str) -> bytes | None:
        """Return the calibration with this fingerprint; None if it isn't stored."""
        c = models.calibrations.c
        with self.transaction() as connection:
            return connection.execute(select(c.content).where(c.fingerprint == fingerprint)).scalar()
