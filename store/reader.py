"""`StoreReader`, the interface for code that only reads the store; `repository.py` has the one that also writes."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
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
from moevolve.store.pareto import Cell, Mark, Size, read_cells, read_front, read_marks
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
    Course,
    EvaluationRecord,
    Event,
    EventKind,
    IndividualDetail,
    IndividualRecord,
    LineageGraph,
    Order,
    SearchRecord,
    SearchSummary,
    SearchTaskRecord,
    Split,
)
from moevolve.store.schema import location, prepare
from moevolve.store.session import make_engine, transaction

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S", bound="StoreReader")


def retrying(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """Decorates an idempotent method of a store to be retried while the database is unreachable.

    After a lost connection it is unknown whether the transaction was committed, so only idempotent methods are retried:
    reads, and writes that state a result rather than a change. A repeated write finds its own rows and leaves them, or
    is refused because another driver has acquired the lease. Creating a search and acquiring a lease are not
    idempotent: the second time, the search exists or the lease is held.
    """

    @wraps(method)
    def retried(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
        pause = 0.05
        while True:
            try:
                found = method(self, *args, **kwargs)
            except UnreachableError:
                if not self._may_wait(pause):
                    raise
                time.sleep(pause)
                pause = min(2 * pause, 1.0)
            else:
                self._unreachable_since = None
                return found

    return retried


class StoreReader:
    """Reads searches, individuals, evaluations and lineage from one SQL database (SQLite or PostgreSQL).

    No method writes, and the database connection of a `StoreReader` refuses writes. `Store`, which also writes
    (`moevolve.store.repository`), is a subclass. The contract is the same on every backend:

    * **Transactions.** Each method is one transaction, which sees one committed state.
    * **Any number of readers** in any number of processes. Readers and writers never block each other.
    * **Plain values.** Methods take and return frozen records that don't depend on a connection.
    * **Errors.** Every error is a `StoreError` with a one-line message.

    A reader may be used from several threads. Use it as a context manager, or call `close()`.

    Attributes:
        url: URL of the database.
        is_new: True if opening the store created it.
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
        """Opens the store at `url`, also while others write to it, and also in a read-only folder.

        Args:
            url: URL of the database (`sqlite:///file.db`, `postgresql://user@host/name`).

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

    def _may_wait(self, pause: float) -> bool:
        """Whether an unreachable database may be retried after `pause` more seconds."""
        now = time.monotonic()
        self._unreachable_since = now if self._unreachable_since is None else self._unreachable_since
        return now + pause - self._unreachable_since <= self.retry_timeout_s

    def close(self) -> None:
        """Closes all connections. Closing twice is harmless."""
        self._engine.dispose()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @retrying
    def search(self, name_or_id: str) -> SearchRecord:
        """The search with this id or name.

        Raises:
            NotFoundError: There is none; the message suggests similar names.
        """
        with self.transaction() as connection:
            return find_search(connection, name_or_id)

    @retrying
    def searches(self) -> list[SearchSummary]:
        """All searches with their counts, oldest first."""
        with self.transaction() as connection:
            return read_searches(connection)

    @retrying
    def model_facts(self, search_id: str) -> str | None:
        """Facts of a search's model as JSON; None if it was stored without them."""
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
    def control(self, search_id: str) -> Control:
        """The driver of a search, its state, and what users ask of it."""
        with self.transaction() as connection:
            return leases.read(connection, search_id)

    @retrying
    def controls(self) -> dict[str, Control]:
        """The driver of each search, its state, and what users ask of it, by the search's id."""
        with self.transaction() as connection:
            return leases.read_all(connection)

    @retrying
    def running(self) -> dict[str, Control]:
        """The same for the searches that have a driver."""
        with self.transaction() as connection:
            return leases.running(connection)

    @retrying
    def events(self, after: Mapping[str, int], limit: int = 1000) -> list[Event]:
        """The events of some searches after the last known ones, in order of time.

        Args:
            after: Number of the last known event by search id.
            limit: Maximum number of events per search; call again with the last number for more.
        """
        with self.transaction() as connection:
            return events.read_events(connection, after, limit)

    @retrying
    def latest_events(
        self, search_id: str | None = None, limit: int = 100, kinds: Collection[EventKind] = ()
    ) -> list[Event]:
        """The latest events of a search, or of all searches, newest first; of all kinds if none are given."""
        with self.transaction() as connection:
            return events.read_latest(connection, search_id, limit, kinds)

    @retrying
    def evaluations(
        self,
        phenotype_hashes: str | Sequence[str],
        model_fingerprint: str,
        engine_fingerprint: str,
        task_fingerprints: Sequence[str],
    ) -> list[EvaluationRecord]:
        """The stored evaluations of some phenotypes on some task splits, failed ones included.

        Any number of phenotypes and splits may be given. The result is sorted by phenotype hash and task fingerprint.
        """
        hashes = [phenotype_hashes] if isinstance(phenotype_hashes, str) else sorted(set(phenotype_hashes))
        with self.transaction() as connection:
            ids = context_ids(connection, model_fingerprint, engine_fingerprint, task_fingerprints)
            return read_evaluations(connection, ids, hashes)

    @retrying
    def history(self, search_id: str) -> list[IndividualRecord]:
        """All recorded individuals of a search, sorted by index."""
        with self.transaction() as connection:
            return read_history(connection, search_id)

    @retrying
    def page(
        self, search_id: str, order: Order = "best", after: int | None = None, limit: int = 50
    ) -> list[IndividualRecord]:
        """A page of a search's individuals. Every page takes the same time, however large the search is.

        Args:
            search_id: Id of the search.
            order: Order of the listing: `best` lists individuals with a fitness by rank; `newest` all, latest first;
                `failed` those that failed, latest first.
            after: Index of the last individual on the previous page; None for the first page.
            limit: Maximum number of individuals.

        Raises:
            NotFoundError: There is no individual `after`.
        """
        with self.transaction() as connection:
            last = None
            if after is not None:
                found = read_history(connection, search_id, [after])
                if not found:
                    raise NotFoundError(f"no individual {after} in search {search_id}")
                last = found[0]
            return queries.read_page(connection, search_id, order, last, limit)

    @retrying
    def fitness_by_index(self, search_id: str, first: int = 0) -> list[tuple[int, float]]:
        """Index and fitness of a search's individuals from `first` on that have a fitness, in no particular order."""
        i = models.individuals.c
        query = select(i.idx, i.fitness).where(i.search_id == search_id, i.status == "ok", i.idx >= first)
        with self.transaction() as connection:
            return [(row.idx, row.fitness) for row in connection.execute(query)]

    @retrying
    def course(self, search_id: str) -> Course:
        """How the best fitness of a search rose over individuals and over time. Its cost is that of its events."""
        with self.transaction() as connection:
            return events.read_course(connection, search_id)

    @retrying
    def costs(self, search: SearchRecord) -> SearchCosts:
        """The cost of a search's evaluations."""
        with self.transaction() as connection:
            return read_costs(connection, search)

    @retrying
    def individual(self, ref: str) -> IndividualDetail:
        """The individual `SEARCH:INDEX` (search name or id), with its evaluations and exports.

        Raises:
            NotFoundError: The reference has another form, or there is no such search or individual; the message
                suggests similar ones.
        """
        with self.transaction() as connection:
            return read_individual(connection, ref)

    @retrying
    def best(
        self,
        task: str | None = None,
        experts: int | None = None,
        active: int | None = None,
        search: str | None = None,
        limit: int = 10,
        by: Split = "dev",
    ) -> list[BestRow]:
        """The best configurations for a task.

        Only individuals with status `ok` appear, each phenotype (per model) once, under its earliest individual. Rows
        are sorted by score, then mean gold log-probability, then the search's age and the index.

        Args:
            task: Name of the task; None ranks every task, sorted by name, with `limit` rows each.
            experts: Number of experts n' that a configuration must have.
            active: Number of active experts k that a configuration must have.
            search: Name or id of the search that individuals must belong to.
            limit: Maximum number of rows.
            by: Split that ranks. `search` ranks by the search-split score. `dev` ranks configurations with a dev score
                first, by that score, and others after them by their search-split score; those that failed on dev do
                not appear. `test` ranks only configurations with a test score, by that score.

        Raises:
            StoreError: The task or search is unknown; the message suggests similar names.
        """
        with self.transaction() as connection:
            only = find_search(connection, search) if search is not None else None
            tasks = queries.known_tasks(connection) if task is None else [task]
            where = queries.Filter(experts, active, only)
            return [row for one in tasks for row in queries.best(connection, one, where, limit, by)]

    @retrying
    def best_of_search(self, search_id: str, limit: int = 1) -> list[IndividualRecord]:
        """The best `ok` individuals of a search by (fitness desc, tie_break desc, index asc), each phenotype once."""
        with self.transaction() as connection:
            return queries.read_in_order(connection, search_id, queries.best_indices(search_id, limit))

    @retrying
    def pareto(
        self, task: str, split: Split = "search", search: str | None = None, size: Size = "parameters"
    ) -> list[BestRow]:
        """The Pareto front of score against parameters, or those used per token, from the smallest model on."""
        with self.transaction() as connection:
            only = find_search(connection, search) if search is not None else None
            return read_front(connection, task, split, only, size)

    @retrying
    def candidate_cells(
        self, task: str, split: Split = "search", search: str | None = None, size: Size = "parameters"
    ) -> list[Cell]:
        """All scored candidates, counted in at most 200 x 200 cells of a chart of score against size."""
        with self.transaction() as connection:
            only = find_search(connection, search) if search is not None else None
            return read_cells(connection, task, split, only, size)

    @retrying
    def marks(self, task: str, split: Split, search: str | None, operators: Collection[str]) -> list[Mark]:
        """Models to compare candidates with: the full model, and the first individuals that some operators made.

        Args:
            task: Name of the task.
            split: Split of the scores.
            search: Name or id of a search; None takes the newest 20 that have the task.
            operators: Operators of individuals without parents. Only the first 64 individuals of a search count.
        """
        with self.transaction() as connection:
            only = find_search(connection, search) if search is not None else None
            return read_marks(connection, task, split, only, operators)

    @retrying
    def ancestors(self, ref: str, max_depth: int | None = None) -> LineageGraph:
        """The individual `SEARCH:INDEX` and its ancestors, at most `max_depth` generations back."""
        with self.transaction() as connection:
            return lineage(connection, ref, "ancestors", max_depth)

    @retrying
    def descendants(self, ref: str, max_depth: int | None = None) -> LineageGraph:
        """The individual `SEARCH:INDEX` and its descendants, at most `max_depth` generations on."""
        with self.transaction() as connection:
            return lineage(connection, ref, "descendants", max_depth)

    @retrying
    def calibrations(self) -> list[str]:
        """Fingerprints of all calibrations."""
        c = models.calibrations.c
        with self.transaction() as connection:
            return list(connection.execute(select(c.fingerprint).order_by(c.fingerprint)).scalars())

    @retrying
    def calibration(self, fingerprint: str) -> bytes | None:
        """The calibration with this fingerprint; None if there is none."""
        c = models.calibrations.c
        with self.transaction() as connection:
            return connection.execute(select(c.content).where(c.fingerprint == fingerprint)).scalar()
