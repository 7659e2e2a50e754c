"""The store's one door: every read and write of the service goes through `Store`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, fields
from datetime import datetime, timedelta
from functools import wraps
from types import TracebackType
from typing import Concatenate, ParamSpec, Self, TypeVar

from sqlalchemy import Connection, Engine, delete, func, select, update

from moevolve.store import deliveries, events, leases, queries
from moevolve.store import tables as models
from moevolve.store.costs import SearchCosts, read_costs
from moevolve.store.errors import NameTakenError, NotFoundError, StoreError, UnreachableError
from moevolve.store.files import BUSY_SECONDS
from moevolve.store.leases import Dead
from moevolve.store.lineage import find_individual, find_search, lineage
from moevolve.store.queries import (
    context_ids,
    read_evaluations,
    read_history,
    read_individual,
    read_searches,
)
from moevolve.store.records import (
    SEARCH_STATUSES,
    UNBOUND,
    BestRow,
    Claim,
    Control,
    EvaluationRecord,
    Event,
    ExportRecord,
    IndividualDetail,
    IndividualRecord,
    Lease,
    LineageGraph,
    Order,
    Progress,
    SearchRecord,
    SearchStatus,
    SearchSummary,
    SearchTaskRecord,
    Split,
    Wanted,
)
from moevolve.store.schema import prepare
from moevolve.store.session import (
    hold_content,
    insert_all,
    insert_new,
    make_engine,
    transaction,
    vacuum,
    wait_for_locks,
)
from moevolve.store.writes import (
    ContextKey,
    touch,
    utc_now,
    write_evaluations,
    write_export,
    write_individuals,
    write_retry,
)

P = ParamSpec("P")
R = TypeVar("R")
_READERS_S = 10.0
"""How long it is tried to read a SQLite file that others begin to write to every time."""


def patient(method: Callable[Concatenate[Store, P], R]) -> Callable[Concatenate[Store, P], R]:
    """A method of `Store` that is tried again while the database is away, for `patience_s` in all.

    A lost connection leaves open whether its transaction was committed, so only what may be repeated is patient: reads,
    and writes that say what is to be, not what is to change. Repeated, a write finds its own rows and leaves them, or
    finds that another driver has the search since (each checks the lease's epoch in its own transaction), and is
    refused. Creating a search and taking a lease are not of this kind: the second time, it is there, or held.
    """

    @wraps(method)
    def tried_again(self: Store, /, *args: P.args, **kwargs: P.kwargs) -> R:
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


class Store:
    """Searches, individuals, evaluations and lineage in one SQL database (SQLite or PostgreSQL).

    The contract, the same on every backend:

    * **Transactions.** Each method is one transaction: it happens whole or not at all, also when the process is killed.
    * **Idempotent writes.** Repeating a write with the same content changes nothing. An evaluation there already
      stays: the first rules. An individual at a taken index with another genome, or a second, different fitness for
      the same individual, is an error.
    * **One writer per search, any number of searches and readers.** Several processes may share one store; readers see
      committed data and never block the writer. A driver has its search's lease, and whoever lost it writes nothing
      (`moevolve.store.leases`).
    * **Plain values.** Frozen records go in and come out; nothing that comes out is tied to a connection.
    * **Errors.** Whatever goes wrong is a `StoreError` with a one-line message.

    A `Store` may be used from several threads. Use it as a context manager, or call `close()`.

    Attributes:
        url: of the database.
        read_only: whether it was opened for reading.
        patience_s: how long in all a database is waited for that is away (`patient`), or a file that another process
            writes to; who drives a search sets it.
    """

    def __init__(self, engine: Engine, url: str, read_only: bool = False) -> None:
        """For `open`; the engine's database, at `url`, is a store at the current schema."""
        self._engine = engine
        self.url = url
        self.read_only = read_only
        self.patience_s = 0.0 if not self.is_file else _READERS_S if read_only else BUSY_SECONDS
        wait_for_locks(engine, lambda: self.patience_s)
        self._silent_since: float | None = None
        self._contexts: dict[ContextKey, int] = {}

    @classmethod
    def open(cls, url: str, create: bool = True, read_only: bool = False) -> Store:
        """Opens the store at `url` (`sqlite:///file.db`, `postgresql://user@host/name`).

        Args:
            url: of the database.
            create: make the store where there is none. False: a missing store is an error and nothing is created.
            read_only: for reading alone, also while others write: nothing is created or changed, by the database's own
                guard, and nobody is kept from writing. A SQLite store may be in a folder that can't be written to.

        Raises:
            StoreError: wrong URL, unreachable database, missing folder or store, a database that isn't a store of
                moevolve, a store of another schema version, or, to write to, a SQLite file on a network file system.
                The database is left untouched.
        """
        create = create and not read_only
        store = cls(make_engine(url, create, read_only), url, read_only)
        try:
            store._prepare(create)
        except BaseException:
            store.close()
            raise
        return store

    @patient
    def _prepare(self, create: bool) -> None:
        prepare(self._engine, create)

    @property
    def is_file(self) -> bool:
        """Whether it is SQLite's, which the processes of one machine alone may share."""
        return self._engine.dialect.name == "sqlite"

    def vacuum(self) -> bool:
        """Gives the room of deleted rows back, where the database is a file; whether it is one."""
        return vacuum(self._engine)

    @contextmanager
    def transaction(self, write: bool = False) -> Iterator[Connection]:
        """One transaction of what keeps stores up, beside the methods below; see `session.transaction`."""
        with transaction(self._engine, write, bounded=False) as connection:
            yield connection

    def _waits(self, pause: float) -> bool:
        """Whether a database that is away is to be waited for that much longer."""
        now = time.monotonic()
        self._silent_since = now if self._silent_since is None else self._silent_since
        return now + pause - self._silent_since <= self.patience_s

    def close(self) -> None:
        """Gives back all connections. Closing twice is harmless."""
        self._engine.dispose()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def create_search(self, search: SearchRecord, tasks: Sequence[SearchTaskRecord]) -> None:
        """Adds a search with its task splits.

        Raises:
            NameTakenError: the name is taken.
            StoreError: the id is taken, or either is that of another search crosswise; or the name is empty or has a
                `:` in it.
        """
        now = utc_now()
        if not search.id or not search.name.strip() or ":" in search.name + search.id:
            raise StoreError(f"a search needs an id and a name without ':', got {search.id!r} and {search.name!r}")
        _check_status(search.status)
        row = {one.name: getattr(search, one.name) for one in fields(search)}
        row |= {"created_at": search.created_at or now, "updated_at": search.updated_at or search.created_at or now}
        with transaction(self._engine, write=True) as connection:
            hold_content(connection)
            both = [search.id, search.name]
            taken = models.searches.c.id.in_(both) | models.searches.c.name.in_(both)
            other = connection.execute(select(models.searches).where(taken)).first()
            if other is None and not insert_new(connection, models.searches, [row]):
                # Another process was adding it just now.
                other = connection.execute(select(models.searches).where(taken)).one()
            if other is not None:
                kind = NameTakenError if other.name == search.name else StoreError
                raise kind(
                    f"there is a search {other.name!r} (id {other.id}) already; resume it or choose another name"
                )
            insert_all(connection, models.leases, [leases.unheld(search.id)])
            rows = [{"search_id": search.id, "position": place, **asdict(task)} for place, task in enumerate(tasks)]
            insert_all(connection, models.search_tasks, rows)

    @patient
    def search(self, name_or_id: str) -> SearchRecord:
        """The search of this id or name.

        Raises:
            StoreError: there is none; names the nearest ones.
        """
        with transaction(self._engine) as connection:
            return find_search(connection, name_or_id)

    @patient
    def searches(self) -> list[SearchSummary]:
        """All searches with their counts, oldest first."""
        with transaction(self._engine) as connection:
            return read_searches(connection)

    def acquire(
        self,
        search_id: str,
        owner: str,
        seconds: float,
        dead: Dead = lambda _: False,
        priority: int | None = None,
    ) -> Lease:
        """Takes the lease of a search, the right to write to it, for so many seconds.

        Args:
            search_id: of the search.
            owner: who takes it, for people.
            seconds: until it runs out, unless it is renewed.
            dead: whether an owner whose lease lasts is known to be gone.
            priority: of the search from now on; None leaves it as it is.

        Raises:
            LeaseHeldError: another driver has it.
            StoreError: unknown search.
        """
        with transaction(self._engine, write=True) as connection:
            return leases.acquire(connection, search_id, owner, seconds, dead, priority)

    @patient
    def running(self, dead: Dead = lambda _: False) -> dict[str, str]:
        """Names of the searches that are being run, with who does; `dead` as `acquire` has it."""
        with transaction(self._engine) as connection:
            return leases.running(connection, dead)

    @patient
    def renew(
        self,
        lease: Lease,
        seconds: float,
        stage: str | None = None,
        progress: Progress | None = None,
        claim: Claim | None = None,
    ) -> Control:
        """Keeps a lease for so many seconds from now on, also one that ran out and nobody took.

        Args:
            lease: which.
            seconds: that it lasts.
            stage: what its owner does now, one line; None leaves what was said.
            progress: where its search stands; None likewise.
            claim: what it could use; None likewise.

        Returns:
            What is asked of its owner.

        Raises:
            LeaseLostError: another driver has it.
        """
        with transaction(self._engine, write=True) as connection:
            return leases.renew(connection, lease, seconds, stage, progress, claim)

    @patient
    def release(self, lease: Lease) -> None:
        """Gives a lease back, if it is still its owner's."""
        with transaction(self._engine, write=True) as connection:
            leases.release(connection, lease)

    @patient
    def ask(
        self,
        search_id: str,
        wanted: Wanted | None = None,
        workers: int | None = None,
        priority: int | None = None,
        dead: Dead = lambda _: False,
    ) -> Control:
        """Asks the driver of a search for something, which it does within seconds.

        Args:
            search_id: of the search.
            wanted: what it is to do; None leaves that as it is.
            workers: how many workers it is to have; None likewise.
            priority: of its search; None likewise.
            dead: as `acquire` has it.

        Raises:
            StoreError: unknown search, or no driver runs it.
        """
        with transaction(self._engine, write=True) as connection:
            return leases.ask(connection, search_id, wanted, workers, priority, dead)

    @patient
    def control(self, search_id: str, dead: Dead = lambda _: False) -> Control:
        """Who runs a search, and what is asked of it; `dead` as `acquire` has it."""
        with transaction(self._engine) as connection:
            return leases.read(connection, search_id, dead)

    @patient
    def controls(self, dead: Dead = lambda _: False) -> dict[str, Control]:
        """Who runs each search, where it stands and what is asked of it, by its id; `dead` as `acquire` has it."""
        with transaction(self._engine) as connection:
            return leases.read_all(connection, dead)

    @patient
    def claims(self) -> dict[str, Control]:
        """Of the searches that are being run and share clusters, the same."""
        with transaction(self._engine) as connection:
            return leases.read_claims(connection)

    @patient
    def events(self, after: Mapping[str, int], limit: int = 1000) -> list[Event]:
        """What happened to some searches since then, in order of time.

        Args:
            after: by search id, the number of the last event that is known.
            limit: at most so many of each search; ask again from the last one for more.
        """
        with transaction(self._engine) as connection:
            return events.read_events(connection, after, limit)

    @patient
    def latest_events(self, search_id: str | None = None, limit: int = 100) -> list[Event]:
        """What happened last to a search, or to any, newest first."""
        with transaction(self._engine) as connection:
            return events.read_latest(connection, search_id, limit)

    @patient
    def claim_events(
        self, target: str, statuses: Sequence[SearchStatus], since: datetime, seconds: float
    ) -> list[tuple[Event, int]]:
        """Takes the events of new statuses that a target is still to be told of; see `moevolve.store.deliveries`.

        Args:
            target: who.
            statuses: which it is told of.
            since: events before are nobody's news any more.
            seconds: until somebody else may take them, if nothing comes of this.

        Returns:
            Each with the number of times that it was tried before.
        """
        with transaction(self._engine, write=True) as connection:
            now = leases.now_of(connection)
            return deliveries.claim(connection, target, statuses, since, now, seconds)

    @patient
    def settle_event(self, event: Event, target: str, outcome: str, again_in: float | None = None) -> None:
        """Notes how telling a target of an event went, and in how many seconds to try again; None never."""
        with transaction(self._engine, write=True) as connection:
            later = None if again_in is None else leases.now_of(connection) + timedelta(seconds=again_in)
            deliveries.settle(connection, event, target, outcome, later)

    @patient
    def amend_search(self, writer: str | Lease, config: str, beside: Sequence[SearchTaskRecord]) -> None:
        """Replaces what may change of a search after its launch: its configuration and the splits beside its fitness.

        Args:
            writer: the driver's lease, or the id of a search that no driver runs.
            config: as JSON text.
            beside: all that it has from now on, each of weight 0.

        Raises:
            LeaseLostError, LeaseHeldError: the search is another driver's.
            StoreError: unknown search.
        """
        t = models.search_tasks
        with transaction(self._engine, write=True) as connection:
            search_id = touch(connection, writer)
            connection.execute(update(models.searches).where(models.searches.c.id == search_id).values(config=config))
            connection.execute(delete(t).where(t.c.search_id == search_id, t.c.weight == 0))
            first = 1 + (
                connection.execute(select(func.max(t.c.position)).where(t.c.search_id == search_id)).scalar() or 0
            )
            rows = [{"search_id": search_id, "position": first + i, **asdict(task)} for i, task in enumerate(beside)]
            insert_all(connection, t, rows)

    @patient
    def search_tasks(self, search_id: str, *, beside: bool = False) -> list[SearchTaskRecord]:
        """The task splits in a search's fitness, in the order they were given.

        Args:
            beside: those of weight 0 as well.
        """
        t = models.search_tasks.c
        query = select(t.task, t.split, t.task_fingerprint, t.weight).where(t.search_id == search_id)
        query = (query if beside else query.where(t.weight > 0)).order_by(t.position)
        with transaction(self._engine) as connection:
            return [SearchTaskRecord(*row) for row in connection.execute(query)]

    @patient
    def set_status(self, writer: str | Lease, status: SearchStatus, reason: str | None = None) -> None:
        """Changes the status of a search and replaces its reason; `writer` as `amend_search` has it.

        Raises:
            LeaseLostError, LeaseHeldError: the search is another driver's.
            StoreError: unknown search or status.
        """
        _check_status(status)
        with transaction(self._engine, write=True) as connection:
            _set_status(connection, touch(connection, writer), status, reason)

    @patient
    def bind_model(self, search_id: str, fingerprint: str, path: str) -> None:
        """Says, once and for all, which weights a search is about that was stored without them, and where they are.

        Raises:
            StoreError: unknown search, or it is about other weights.
        """
        s = models.searches
        with transaction(self._engine, write=True) as connection:
            touch(connection, search_id)
            open_until_now = s.c.model_fingerprint.startswith(UNBOUND, autoescape=True)
            change = update(s).where(s.c.id == search_id, open_until_now)
            connection.execute(change.values(model_fingerprint=fingerprint, model_path=path))
            bound = connection.execute(select(s.c.model_fingerprint).where(s.c.id == search_id)).scalar()
            if bound != fingerprint:
                raise StoreError(f"search {search_id} is about the weights {bound}, not {fingerprint} ({path})")

    @patient
    def record(
        self,
        writer: str | Lease,
        individuals: Sequence[IndividualRecord] = (),
        evaluations: Sequence[EvaluationRecord] = (),
    ) -> None:
        """Writes a batch of a search's progress in one transaction; the hot path of the driver.

        Individuals are new, or pending ones that are decided now. Parents must be recorded before or in the same
        batch. `writer` is as `amend_search` has it.

        Raises:
            LeaseLostError, LeaseHeldError: the search is another driver's.
            StoreError: unknown search; an index taken by another genome; a parent that isn't recorded; a second,
                different fitness; a score that isn't a finite number. Nothing is written.
        """
        with transaction(self._engine, write=True) as connection:
            search_id = touch(connection, writer)
            before = events.best_rank(connection, search_id)
            decided = write_individuals(connection, search_id, individuals)
            events.append_progress(connection, search_id, decided, before)
            added = write_evaluations(connection, evaluations, self._contexts)
        # Only now: the ids of a transaction that was rolled back mean nothing.
        self._contexts = {**self._contexts, **added}

    @patient
    def add_evaluations(self, evaluations: Sequence[EvaluationRecord]) -> None:
        """Writes evaluations that no search is run for; they belong to none, so whoever runs one is not in the way."""
        with transaction(self._engine, write=True) as connection:
            added = write_evaluations(connection, evaluations, self._contexts)
        self._contexts = {**self._contexts, **added}

    @patient
    def retry(self, writer: str | Lease, first: int) -> None:
        """Takes a search back to before failures that were no candidate's fault.

        Individuals from index `first` on are removed, with their exports' records, and earlier ones that failed by
        fault of a worker or of time are pending again. Evaluations stay, so what comes out again costs nothing. The
        search is interrupted from then on, so that it can be resumed whatever happens to who takes it back.

        Args:
            writer: as `amend_search` has it.
            first: index of the first individual that may have been made in sight of such a failure.

        Raises:
            StoreError: unknown search.
        """
        with transaction(self._engine, write=True) as connection:
            search_id = touch(connection, writer)
            write_retry(connection, search_id, first)
            events.append(connection, search_id, "retried", f"from individual {first} on", first)
            _set_status(connection, search_id, "interrupted", "to be retried")

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
        with transaction(self._engine) as connection:
            ids = context_ids(connection, model_fingerprint, engine_fingerprint, task_fingerprints)
            return read_evaluations(connection, ids, hashes)

    @patient
    def history(self, search_id: str) -> list[IndividualRecord]:
        """All individuals of a search by index, as they are. Gaps are left."""
        with transaction(self._engine) as connection:
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
        with transaction(self._engine) as connection:
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
        with transaction(self._engine) as connection:
            return queries.read_course(connection, search_id, first)

    @patient
    def costs(self, search: SearchRecord) -> SearchCosts:
        """What a search's evaluations cost."""
        with transaction(self._engine) as connection:
            return read_costs(connection, search)

    @patient
    def individual(self, ref: str) -> IndividualDetail:
        """The individual `SEARCH:INDEX` (search name or id), with its evaluations and exports.

        Raises:
            StoreError: the reference isn't of that form, or names no search or individual; names the nearest ones.
        """
        with transaction(self._engine) as connection:
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
        with transaction(self._engine) as connection:
            only = find_search(connection, search) if search is not None else None
            tasks = queries.known_tasks(connection) if task is None else [task]
            where = queries.Filter(experts, active, only)
            return [row for one in tasks for row in queries.best(connection, one, where, limit, by)]

    @patient
    def best_of_search(self, search_id: str, limit: int = 1) -> list[IndividualRecord]:
        """The best `ok` individuals of a search by (fitness desc, tie_break desc, index asc), each phenotype once."""
        with transaction(self._engine) as connection:
            indices = list(connection.execute(queries.best_indices(search_id, limit)).scalars())
            rows = {row.index: row for row in read_history(connection, search_id, indices)}
        return [rows[index] for index in indices]

    @patient
    def pareto(self, task: str, split: Split = "search", search: str | None = None) -> list[BestRow]:
        """The configurations that no other beats in both score and parameters, from fewest parameters to most."""
        with transaction(self._engine) as connection:
            only = find_search(connection, search) if search is not None else None
            return queries.pareto(connection, task, split, only)

    @patient
    def ancestors(self, ref: str, max_depth: int | None = None) -> LineageGraph:
        """The individual `SEARCH:INDEX` and all it descends from, at most `max_depth` generations back."""
        with transaction(self._engine) as connection:
            return lineage(connection, ref, "ancestors", max_depth)

    @patient
    def descendants(self, ref: str, max_depth: int | None = None) -> LineageGraph:
        """The individual `SEARCH:INDEX` and all that descend from it, at most `max_depth` generations on."""
        with transaction(self._engine) as connection:
            return lineage(connection, ref, "descendants", max_depth)

    @patient
    def add_export(self, ref: str, export: ExportRecord) -> None:
        """Notes that an individual was exported. The same path again replaces the earlier note."""
        with transaction(self._engine, write=True) as connection:
            search, row = find_individual(connection, ref)
            write_export(connection, search.id, row.idx, export)
            events.append(connection, search.id, "exported", f"individual {row.idx} to {export.path}", row.idx)

    @patient
    def add_calibration(self, fingerprint: str, content: bytes) -> None:
        """Keeps a calibration; one that is there already stays."""
        with transaction(self._engine, write=True) as connection:
            row = {"fingerprint": fingerprint, "content": content, "created_at": utc_now()}
            insert_new(connection, models.calibrations, [row])

    @patient
    def calibrations(self) -> list[str]:
        """Fingerprints of all calibrations."""
        c = models.calibrations.c
        with transaction(self._engine) as connection:
            return list(connection.execute(select(c.fingerprint).order_by(c.fingerprint)).scalars())

    @patient
    def calibration(self, fingerprint: str) -> bytes | None:
        """The calibration of this fingerprint, None if there is none."""
        c = models.calibrations.c
        with transaction(self._engine) as connection:
            return connection.execute(select(c.content).where(c.fingerprint == fingerprint)).scalar()


def _set_status(connection: Connection, search_id: str, status: SearchStatus, reason: str | None) -> None:
    before = find_search(connection, search_id)
    change = update(models.searches).where(models.searches.c.id == search_id)
    connection.execute(change.values(status=status, status_reason=reason))
    # Who runs it again is news; who says the same again, because a connection was lost over it, isn't.
    if status == "running" or (before.status, before.status_reason) != (status, reason):
        events.append(connection, search_id, "status", f"{status}: {reason}" if reason else status)


def _check_status(status: str) -> None:
    if status not in SEARCH_STATUSES:
        raise StoreError(f"no such status of a search: {status!r}; it is one of {', '.join(SEARCH_STATUSES)}")
