"""The store's one door for writing: every write of the service goes through `Store`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, fields
from typing import Self

from sqlalchemy import Connection, Engine, delete, func, select, update

from moevolve.store import events, leases
from moevolve.store import tables as models
from moevolve.store.errors import NameTakenError, StoreError
from moevolve.store.files import BUSY_SECONDS
from moevolve.store.lineage import find_individual, find_search
from moevolve.store.reader import StoreReader, patient
from moevolve.store.records import (
    SEARCH_STATUSES,
    UNBOUND,
    Control,
    DesiredState,
    EvaluationRecord,
    ExportRecord,
    IndividualRecord,
    Lease,
    Progress,
    ResourceRequest,
    SearchRecord,
    SearchStatus,
    SearchTaskRecord,
)
from moevolve.store.session import (
    insert_all,
    insert_new,
    lock_against_prune,
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


class Store(StoreReader):
    """Searches, individuals, evaluations and lineage in one SQL database, to be read and written.

    The contract, beside that of every `StoreReader`:

    * **Whole or not at all.** So each method happens, also when the process is killed.
    * **Idempotent writes.** Repeating a write with the same content changes nothing. An evaluation there already
      stays: the first rules. An individual at a taken index with another genome, or a second, different fitness for
      the same individual, is an error.
    * **One writer per search, any number of searches.** Several processes may share one store. A driver has its
      search's lease, and whoever lost it writes nothing (`moevolve.store.leases`).
    """

    def __init__(self, engine: Engine, url: str) -> None:
        """For `open`."""
        super().__init__(engine, url)
        self.retry_timeout_s = BUSY_SECONDS if self.is_file else 0.0
        wait_for_locks(engine, lambda: self.retry_timeout_s)
        self._contexts: dict[ContextKey, int] = {}

    @classmethod
    def open(cls, url: str, create: bool = True) -> Self:
        """Opens the store at `url` (`sqlite:///file.db`, `postgresql://user@host/name`).

        Args:
            url: of the database.
            create: make the store where there is none. False: a missing store is an error and nothing is created.

        Raises:
            StoreError: as `StoreReader.open`. The database is left untouched.
        """
        return cls._prepared(make_engine(url, create), url, create)

    @contextmanager
    def write_transaction(self, bounded: bool = True) -> Iterator[Connection]:
        """One transaction that reads and writes; see `session.transaction`."""
        with transaction(self._engine, write=True, bounded=bounded) as connection:
            yield connection

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
        with self.write_transaction() as connection:
            lock_against_prune(connection)
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
        with self.write_transaction() as connection:
            search_id = touch(connection, writer)
            connection.execute(update(models.searches).where(models.searches.c.id == search_id).values(config=config))
            connection.execute(delete(t).where(t.c.search_id == search_id, t.c.weight == 0))
            first = 1 + (
                connection.execute(select(func.max(t.c.position)).where(t.c.search_id == search_id)).scalar() or 0
            )
            rows = [{"search_id": search_id, "position": first + i, **asdict(task)} for i, task in enumerate(beside)]
            insert_all(connection, t, rows)

    @patient
    def set_status(self, writer: str | Lease, status: SearchStatus, reason: str | None = None) -> None:
        """Changes the status of a search and replaces its reason; `writer` as `amend_search` has it.

        Raises:
            LeaseLostError, LeaseHeldError: the search is another driver's.
            StoreError: unknown search or status.
        """
        _check_status(status)
        with self.write_transaction() as connection:
            _set_status(connection, touch(connection, writer), status, reason)

    @patient
    def bind_model(self, search_id: str, fingerprint: str, path: str) -> None:
        """Says, once and for all, which weights a search is about that was stored without them, and where they are.

        Raises:
            StoreError: unknown search, or it is about other weights.
        """
        s = models.searches
        with self.write_transaction() as connection:
            touch(connection, search_id)
            open_until_now = s.c.model_fingerprint.startswith(UNBOUND, autoescape=True)
            change = update(s).where(s.c.id == search_id, open_until_now)
            connection.execute(change.values(model_fingerprint=fingerprint, model_path=path))
            bound = connection.execute(select(s.c.model_fingerprint).where(s.c.id == search_id)).scalar()
            if bound != fingerprint:
                raise StoreError(f"search {search_id} is about the weights {bound}, not {fingerprint} ({path})")

    def acquire(
        self,
        search_id: str,
        owner: str,
        seconds: float,
        priority: int | None = None,
    ) -> Lease:
        """Takes the lease of a search, the right to write to it, for so many seconds.

        Args:
            search_id: of the search.
            owner: who takes it, for people.
            seconds: until it runs out, unless it is renewed.
            priority: of the search from now on; None leaves it as it is.

        Raises:
            LeaseHeldError: another driver has it.
            StoreError: unknown search.
        """
        with self.write_transaction() as connection:
            return leases.acquire(connection, search_id, owner, seconds, priority)

    @patient
    def renew(
        self,
        lease: Lease,
        seconds: float,
        stage: str | None = None,
        progress: Progress | None = None,
        claim: ResourceRequest | None = None,
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
        with self.write_transaction() as connection:
            return leases.renew(connection, lease, seconds, stage, progress, claim)

    @patient
    def release(self, lease: Lease) -> None:
        """Gives a lease back, if it is still its owner's."""
        with self.write_transaction() as connection:
            leases.release(connection, lease)

    @patient
    def ask(
        self,
        search_id: str,
        desired_state: DesiredState | None = None,
        workers: int | None = None,
        priority: int | None = None,
    ) -> Control:
        """Asks the driver of a search for something, which it does within seconds.

        Args:
            search_id: of the search.
            desired_state: what it is to do; None leaves that as it is.
            workers: how many workers it is to have; None likewise.
            priority: of its search; None likewise.

        Raises:
            StoreError: unknown search, or no driver runs it.
        """
        with self.write_transaction() as connection:
            return leases.ask(connection, search_id, desired_state, workers, priority)

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
        with self.write_transaction() as connection:
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
        with self.write_transaction() as connection:
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
        with self.write_transaction() as connection:
            search_id = touch(connection, writer)
            write_retry(connection, search_id, first)
            events.append(connection, search_id, "retried", f"from individual {first} on", first)
            _set_status(connection, search_id, "interrupted", "to be retried")

    @patient
    def add_export(self, ref: str, export: ExportRecord) -> None:
        """Notes that an individual was exported. The same path again replaces the earlier note."""
        with self.write_transaction() as connection:
            search, row = find_individual(connection, ref)
            write_export(connection, search.id, row.idx, export)
            events.append(connection, search.id, "exported", f"individual {row.idx} to {export.path}", row.idx)

    @patient
    def add_calibration(self, fingerprint: str, content: bytes) -> None:
        """Keeps a calibration; one that is there already stays."""
        with self.write_transaction() as connection:
            row = {"fingerprint": fingerprint, "content": content, "created_at": utc_now()}
            insert_new(connection, models.calibrations, [row])

    def vacuum(self) -> bool:
        """Gives the room of deleted rows back, where the database is a file; whether it is one."""
        return vacuum(self._engine)


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
