"""`Store`, through which the service makes all its writes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, fields
from functools import wraps
from typing import Concatenate, Self

from sqlalchemy import Connection, Engine, Integer, delete, func, select, update

from moevolve.store import events, leases
from moevolve.store import tables as models
from moevolve.store.errors import NameTakenError, StoreError
from moevolve.store.lineage import find_individual, find_search
from moevolve.store.reader import P, R, StoreReader, retrying
from moevolve.store.records import (
    EvaluationRecord,
    EventKind,
    ExportRecord,
    IndividualRecord,
    Lease,
    SearchRecord,
    SearchStatus,
    SearchTaskRecord,
    StoredShrink,
)
from moevolve.store.session import (
    BUSY_SECONDS,
    insert_all,
    insert_new,
    lock_against_prune,
    make_engine,
    transaction,
    vacuum,
)
from moevolve.store.writes import (
    touch,
    utc_now,
    write_evaluations,
    write_export,
    write_individuals,
    write_retry,
    write_shrink,
)


def writing(change: Callable[Concatenate[Connection, P], R]) -> Callable[Concatenate[Store, P], R]:
    """Make a method of a store from a change, which is made in a transaction of its own."""

    @wraps(change)
    def method(self: Store, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with self.write_transaction() as connection:
            return change(connection, *args, **kwargs)

    return method


class Store(StoreReader):
    """Reads and writes searches, individuals, evaluations and lineage in one SQL database.

    Its contract adds to that of `StoreReader`:

    * **Atomic.** Each method takes effect completely or not at all, also if the process is killed.
    * **Idempotent writes.** Repeating a write with the same content changes nothing. Of two evaluations with the same
      key, the first one stays. An individual at a taken index with another genome, or a second, different fitness for
      the same individual, is an error.
    * **One writer per search, any number of searches.** Several processes may share one store. A search's driver holds
      its lease, and the writes of a driver that lost its lease are refused (`moevolve.store.leases`).

    Methods with a `writer` take the driver's lease, or the id of a search that has no driver. They raise LeaseLostError
    or LeaseHeldError if another driver runs the search, and StoreError if the search doesn't exist.
    """

    def __init__(self, engine: Engine, url: str) -> None:
        super().__init__(engine, url)
        self.retry_timeout_s = BUSY_SECONDS if self.is_file else 0.0

    @classmethod
    def open(cls, url: str, create: bool = True) -> Self:
        """Open the store at `url`, and create it if it is missing and `create` is true; see `StoreReader.open`."""
        return cls._prepared(make_engine(url, create), url, create)

    @contextmanager
    def write_transaction(self) -> Iterator[Connection]:
        """A transaction that reads and writes; see `session.transaction`."""
        with transaction(self._engine, write=True, wait_s=lambda: self.retry_timeout_s) as connection:
            yield connection

    def create_search(
        self, search: SearchRecord, tasks: Sequence[SearchTaskRecord], model_facts: str | None = None
    ) -> None:
        """Add a search with its task splits, in order.

        The facts of its model, as JSON, allow reading its genomes without the model.

        Raises:
            NameTakenError: Another search has this name.
            StoreError: The id or name equals another search's id or name, the name is empty, or it contains `:`.
        """
        now = utc_now()
        if not search.id or not search.name.strip() or ":" in search.name + search.id:
            raise StoreError(f"a search needs an id and a name without ':', got {search.id!r} and {search.name!r}")
        row = {one.name: getattr(search, one.name) for one in fields(search)} | {"model_facts": model_facts}
        row |= {"created_at": search.created_at or now, "updated_at": search.updated_at or search.created_at or now}
        with self.write_transaction() as connection:
            lock_against_prune(connection)
            both = [search.id, search.name]
            taken = models.searches.c.id.in_(both) | models.searches.c.name.in_(both)
            other = connection.execute(select(models.searches).where(taken)).first()
            if other is None and not insert_new(connection, models.searches, [row]):
                # Another process has added it since the query above.
                other = connection.execute(select(models.searches).where(taken)).one()
            if other is not None:
                kind = NameTakenError if other.name == search.name else StoreError
                raise kind(f"search {other.name!r} (id {other.id}) exists already; resume it or choose another name")
            insert_all(connection, models.leases, [leases.free_lease(search.id)])
            rows = [{"search_id": search.id, "position": place, **asdict(task)} for place, task in enumerate(tasks)]
            insert_all(connection, models.search_tasks, rows)

    @retrying
    def amend_search(self, writer: str | Lease, config: str, auxiliary: Sequence[SearchTaskRecord]) -> None:
        """Replace a search's config, as JSON, and its task splits of weight 0, which may change after its launch."""
        t = models.search_tasks
        with self.write_transaction() as connection:
            search_id = touch(connection, writer)
            connection.execute(update(models.searches).where(models.searches.c.id == search_id).values(config=config))
            connection.execute(delete(t).where(t.c.search_id == search_id, t.c.weight == 0))
            last = (
                connection.execute(
                    select(func.max(t.c.position, type_=Integer)).where(t.c.search_id == search_id)
                ).scalar()
                or 0
            )
            rows = [
                {"search_id": search_id, "position": position, **asdict(task)}
                for position, task in enumerate(auxiliary, last + 1)
            ]
            insert_all(connection, t, rows)

    @retrying
    def set_status(
        self, writer: str | Lease, status: SearchStatus, reason: str | None = None, winner: int | None = None
    ) -> None:
        """Change the status of a search, and replaces its reason, one line for users, and its winner's index."""
        with self.write_transaction() as connection:
            _set_status(connection, touch(connection, writer), status, reason, winner)

    acquire = writing(leases.acquire)
    renew = retrying(writing(leases.renew))
    release = retrying(writing(leases.release))
    ask = retrying(writing(leases.ask))
    add_evaluations = retrying(writing(write_evaluations))

    @retrying
    def record(
        self,
        writer: str | Lease,
        individuals: Sequence[IndividualRecord] = (),
        evaluations: Sequence[EvaluationRecord] = (),
    ) -> None:
        """Write a batch of a search's individuals and evaluations in one transaction.

        Individuals are new, or pending ones that now have an outcome. Parents must be recorded before or in the same
        batch.

        Raises:
            StoreError: An index is taken by another genome, a parent isn't recorded, an individual has a different
                fitness already, or a score isn't a finite number. Nothing is written.
        """
        with self.write_transaction() as connection:
            search_id = touch(connection, writer)
            before = events.best_rank(connection, search_id)
            decided = write_individuals(connection, search_id, individuals)
            # Evaluations first: they tell how a fitness is shown.
            write_evaluations(connection, evaluations)
            events.append_progress(connection, search_id, decided, before)

    @retrying
    def retry(self, writer: str | Lease, first: int) -> None:
        """Take a search back to before failures that were not the candidates' fault.

        Individuals from index `first` on are removed, with the records of their exports. Earlier ones that failed by
        fault of a worker or the time limit become pending. Evaluations stay and will be reused. The search's status
        becomes `interrupted`, so that it can be resumed even if this process dies.

        Args:
            writer: Lease or search id, see `Store`.
            first: Index of the first individual whose parents may have been selected with such a failure in view.
        """
        with self.write_transaction() as connection:
            search_id = touch(connection, writer)
            write_retry(connection, search_id, first)
            events.append(connection, search_id, "retried", f"from individual {first} on, by {events.asker()}", first)
            _set_status(connection, search_id, "interrupted", "to be retried")

    @retrying
    def note(self, search_id: str, kind: EventKind, text: str) -> None:
        """Append an event to a search. It needs no lease, and after a lost connection it may be there twice."""
        with self.write_transaction() as connection:
            events.append(connection, search_id, kind, text)

    @retrying
    def add_export(self, ref: str, export: ExportRecord) -> None:
        """Record an export of an individual; replace an earlier record with the same path."""
        with self.write_transaction() as connection:
            search, row = find_individual(connection, ref)
            write_export(connection, search.id, row.idx, export)
            text = f"individual {row.idx} to {export.path}, by {events.asker()}"
            events.append(connection, search.id, "exported", text, row.idx)

    @retrying
    def record_shrink(self, shrink: StoredShrink) -> None:
        """Record the state of a shrink; replaces its earlier state."""
        with self.write_transaction() as connection:
            write_shrink(connection, shrink)

    @retrying
    def add_calibration(self, fingerprint: str, content: bytes) -> None:
        """Store a calibration, unless there is one with this fingerprint."""
        with self.write_transaction() as connection:
            row = {"fingerprint": fingerprint, "content": content, "created_at": utc_now()}
            insert_new(connection, models.calibrations, [row])

    def vacuum(self) -> bool:
        """Return the space of deleted rows to the file system; False if the store is not a file."""
        return vacuum(self._engine)


def _set_status(
    connection: Connection, search_id: str, status: SearchStatus, reason: str | None, winner: int | None = None
) -> None:
    before = find_search(connection, search_id)
    change = update(models.searches).where(models.searches.c.id == search_id)
    connection.execute(change.values(status=status, status_reason=reason, winner=winner))
    # Setting the same status again is no event (a retry after a lost connection), except that a search runs again.
    if status == "running" or (before.status, before.status_reason) != (status, reason):
        events.append(connection, search_id, "status", f"{status}: {reason}" if reason else status)
