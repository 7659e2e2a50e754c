"""The store as everybody sees it who only reads; `repository.py` has who writes, too."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from types import TracebackType
from typing import Concatenate, ParamSpec, Self, TypeVar

from sqlalchemy import Connection, Engine, select

from moevolve.store import events, leases, queries
from moevolve.store import tables as models
from moevolve.store.costs import SearchCosts, read_costs
from moevolve.store.errors import NotFoundError, UnreachableError
from moevolve.store.lineage import find_search, lineage
from moevolve.store.queries import (
    context_ids,
    read_evaluations,
    read_history,
    read_individual,
    read_searches,
)
from moevolve.store.records import (
    BestRow,
    Control,
    EvaluationRecord,
    Event,
    IndividualDetail,
    IndividualRecord,
    LineageGraph,
    Order,
    SearchRecord,
    SearchSummary,
    SearchTaskRecord,
    Split,
)
from moevolve.store.schema import place, prepare
from moevolve.store.session import make_engine, transaction

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S", bound="StoreReader")


def patient(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """A method of a store that is tried again while the database is away, for `retry_timeout_s` in all.

    A lost connection leaves open whether its transaction was committed, so only what may be repeated is patient: reads,
    and writes that say what is to be, not what is to change. Repeated, a write finds its own rows and leaves them, or
    finds that another driver has the search since (each checks the lease's epoch in its own transaction), and is
    refused. Creating a search and taking a lease are not of this kind: the second time, it is there, or held.
    """

    @wraps(method)
    def tried_again(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
        pause = 0.05
        while True:
            try:
                found = method(self, *args, **kwargs)
            except UnreachableError:
                if not self._waits(pause):
                    raise
                time.sleep(pause)
                pause = min(2 * pause, 1.0)
            else:
                self._silent_since = None
                return found

    return tried_again


class StoreReader:
    """Searches, individuals, evaluations and lineage in one SQL database (SQLite or PostgreSQL), to be read.

    No method writes, and what `open` gives could not: the database itself refuses. A `Store`, which writes as well
    (`moevolve.store.repository`), may be given to whoever takes a reader. The contract, the same on every backend:

    * **Transactions.** Each method is one transaction, which sees one state of what is committed.
    * **Any number of readers**, in any number of processes. They never block a writer, nor does it block them.
    * **Plain values.** Frozen records go in and come out; nothing that comes out is tied to a connection.
    * **Errors.** Whatever goes wrong is a `StoreError` with a one-line message.

    It may be used from several threads. Use it as a context manager, or call `close()`.

    Attributes:
        url: of the database.
        is_new: whether there was none, and opening it made it.
        retry_timeout_s: seconds for which an operation is tried again while the database is away (`patient`) or another
            process writes to the file; a search's driver sets it.
    """

    def __init__(self, engine: Engine, url: str) -> None:
        """For `open`."""
        self._engine = engine
        self.url = url
        self.is_new = False
        self.retry_timeout_s = 0.0
        self._silent_since: float | None = None

    @classmethod
    def open(cls, url: str) -> Self:
        """Opens the store at `url`, also while others write; it may be in a folder that can't be written to.

        Args:
            url: of the database (`sqlite:///file.db`, `postgresql://user@host/name`).

        Raises:
            StoreError: wrong URL, unreachable database, missing folder or store, a database that isn't a store of
                moevolve, or a store of another schema version.
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

    @patient
    def _prepare(self, create: bool) -> None:
        self.is_new = prepare(self._engine, create)

    @property
    def place(self) -> str:
        """The file of SQLite's, the URL of others, without its password."""
        return place(self._engine)

    @property
    def is_file(self) -> bool:
        """Whether it is SQLite's, which the processes of one machine alone may share."""
        return self._engine.dialect.name == "sqlite"

    @contextmanager
    def transaction(self) -> Iterator[Connection]:
        """One transaction that reads; see `session.transaction`."""
        with transaction(self._engine) as connection:
            yield connection

    def _waits(self, pause: float) -> bool:
        """Whether a database that is away is to be waited for that much longer."""
        now = time.monotonic()
        self._silent_since = now if self._silent_since is None else self._silent_since
        return now + pause - self._silent_since <= self.retry_timeout_s

    def close(self) -> None:
        """Gives back all connections. Closing twice is harmless."""
        self._engine.dispose()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @patient
    def search(self, name_or_id: str) -> SearchRecord:
        """The search of this id or name.

        Raises:
            StoreError: there is none; names the nearest ones.
        """
        with self.transaction() as connection:
            return find_search(connection, name_or_id)

    @patient
    def searches(self) -> list[SearchSummary]:
        """All searches with their counts, oldest first."""
        with self.transaction() as connection:
            return read_searches(connection)

    @patient
    def search_tasks(self, search_id: str, *, beside: bool = False) -> list[SearchTaskRecord]:
        """The task splits in a search's fitness, in the order they were given.

        Args:
            beside: those of weight 0 as well.
        """
        t = models.search_tasks.c
        query = select(t.task, t.split, t.task_fingerprint, t.weight).where(t.search_id == search_id)
        query = (query if beside else query.where(t.weight > 0)).order_by(t.position)
        with self.transaction() as connection:
            return [SearchTaskRecord(*row) for row in connection.execute(query)]

    @patient
    def control(self, search_id: str) -> Control:
        """Who runs a search, and what is asked of it."""
        with self.transaction() as connection:
            return leases.read(connection, search_id)

    @patient
    def controls(self) -> dict[str, Control]:
        """Who runs each search, where it stands and what is asked of it, by its id."""
        with self.transaction() as connection:
            return leases.read_all(connection)

    @patient
    def running(self) -> dict[str, Control]:
        """The same of those alone that are being run."""
        with self.transaction() as connection:
            return leases.running(connection)

    @patient
    def events(self, after: Mapping[str, int], limit: int = 1000) -> list[Event]:
        """What happened to some searches since then, in order of time.

        Args:
            after: by search id, the number of the last event that is known.
            limit: at most so many of each search; ask again from the last one for more.
        """
        with self.transaction() as connection:
            return events.read_events(connection, after, limit)

    @patient
    def latest_events(self, search_id: str | None = None, limit: int = 100) -> list[Event]:
        """What happened last to a search, or to any, newest first."""
        with self.transaction() as connection:
            return events.read_latest(connection, search_id, limit)

    @patient
    def evaluations(
        self,
        phenotype_hashes: str | Sequence[str],
        model_fingerprint: str,
        engine_fingerprint: str,
        task_fingerprints: Sequence[str],
    ) -> list[EvaluationRecord]:
        """The stored evaluations of some phenotypes on some task splits (memoisation). Any number of either.

        Returns:
            Those that exist, failed ones included, ordered by phenotype hash and task fingerprint.
        """
        hashes = [phenotype_hashes] if isinstance(phenotype_hashes, str) else sorted(set(phenotype_hashes))
        with self.transaction() as connection:
            ids = context_ids(connection, model_fingerprint, engine_fingerprint, task_fingerprints)
            return read_evaluations(connection, ids, hashes)

    @patient
    def history(self, search_id: str) -> list[IndividualRecord]:
        """All individuals of a search by index, as they are. Gaps are left."""
        with self.transaction() as connection:
            return read_history(connection, search_id)

    @patient
    def page(
        self, search_id: str, order: Order = "best", after: int | None = None, limit: int = 50
    ) -> list[IndividualRecord]:
        """A page of a search's individuals. However many it has, the first page and the last take the same time.

        Args:
            search_id: of the search.
            order: `best` by rank, only of those with a fitness; `newest` the latest first; `failed` of those that did.
            after: index of the last individual of the page before; None for the first page.
            limit: at most so many.

        Raises:
            NotFoundError: there is no individual `after`.
        """
        with self.transaction() as connection:
            last = None
            if after is not None:
                found = read_history(connection, search_id, [after])
                if not found:
                    raise NotFoundError(f"no individual {after} in search {search_id}")
                last = found[0]
            return queries.read_page(connection, search_id, order, last, limit)

    @patient
    def course(self, search_id: str, first: int = 0) -> list[tuple[int, float]]:
        """Index and fitness of a search's individuals from `first` on, those that have one; in no order."""
        with self.transaction() as connection:
            return queries.read_course(connection, search_id, first)

    @patient
    def costs(self, search: SearchRecord) -> SearchCosts:
        """What a search's evaluations cost."""
        with self.transaction() as connection:
            return read_costs(connection, search)

    @patient
    def individual(self, ref: str) -> IndividualDetail:
        """The individual `SEARCH:INDEX` (search name or id), with its evaluations and exports.

        Raises:
            StoreError: the reference isn't of that form, or names no search or individual; names the nearest ones.
        """
        with self.transaction() as connection:
            return read_individual(connection, ref)

    @patient
    def best(
        self,
        task: str | None = None,
        experts: int | None = None,
        active: int | None = None,
        search: str | None = None,
        limit: int = 10,
        by: Split = "dev",
    ) -> list[BestRow]:
        """The best configurations for a task; for every task (`limit` each, by task name) when `task` is None.

        Only individuals with status `ok` appear, each phenotype (per model) once, under its earliest individual. Order:
        score, then mean gold log-probability, then age of the search and index.

        Args:
            experts: only configurations of exactly so many experts n'.
            active: only configurations of exactly so many active experts k.
            search: only individuals of this search (name or id).
            by: `search` ranks by the search-split score. `dev` ranks those with a dev score first, by that score, and
                the others after them by their search-split score; one that failed on dev does not appear. `test` ranks
                by the test score, and only those that have one.

        Raises:
            StoreError: unknown task or search; names the nearest ones.
        """
        with self.transaction() as connection:
            only = find_search(connection, search) if search is not None else None
            tasks = queries.known_tasks(connection) if task is None else [task]
            where = queries.Filter(experts, active, only)
            return [row for one in tasks for row in queries.best(connection, one, where, limit, by)]

    @patient
    def best_of_search(self, search_id: str, limit: int = 1) -> list[IndividualRecord]:
        """The best `ok` individuals of a search by (fitness desc, tie_break desc, index asc), each phenotype once."""
        with self.transaction() as connection:
            indices = list(connection.execute(queries.best_indices(search_id, limit)).scalars())
            rows = {row.index: row for row in read_history(connection, search_id, indices)}
        return [rows[index] for index in indices]

    @patient
    def pareto(self, task: str, split: Split = "search", search: str | None = None) -> list[BestRow]:
        """The configurations that no other beats in both score and parameters, from fewest parameters to most."""
        with self.transaction() as connection:
            only = find_search(connection, search) if search is not None else None
            return queries.pareto(connection, task, split, only)

    @patient
    def ancestors(self, ref: str, max_depth: int | None = None) -> LineageGraph:
        """The individual `SEARCH:INDEX` and all it descends from, at most `max_depth` generations back."""
        with self.transaction() as connection:
            return lineage(connection, ref, "ancestors", max_depth)

    @patient
    def descendants(self, ref: str, max_depth: int | None = None) -> LineageGraph:
        """The individual `SEARCH:INDEX` and all that descend from it, at most `max_depth` generations on."""
        with self.transaction() as connection:
            return lineage(connection, ref, "descendants", max_depth)

    @patient
    def calibrations(self) -> list[str]:
        """Fingerprints of all calibrations."""
        c = models.calibrations.c
        with self.transaction() as connection:
            return list(connection.execute(select(c.fingerprint).order_by(c.fingerprint)).scalars())

    @patient
    def calibration(self, fingerprint: str) -> bytes | None:
        """The calibration of this fingerprint, None if there is none."""
        c = models.calibrations.c
        with self.transaction() as connection:
            return connection.execute(select(c.content).where(c.fingerprint == fingerprint)).scalar()
