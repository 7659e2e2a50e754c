"""The store's one door: every read and write of the service goes through `Store`."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType

from moevolve.store.records import (
    BestRow,
    EvaluationRecord,
    ExportRecord,
    FitnessRecord,
    HistoryRow,
    IndividualDetail,
    IndividualRecord,
    LineageGraph,
    SearchRecord,
    SearchStatus,
    SearchSummary,
    SearchTaskRecord,
    Split,
)


class Store:
    """Searches, individuals, evaluations and lineage in one SQL database (SQLite or PostgreSQL).

    The contract, the same on every backend:

    * **Transactions.** Each method is one transaction: it happens whole or not at all, also when the process is killed.
    * **Idempotent writes.** Repeating a write with the same content changes nothing. An evaluation that is already there
      stays (the first rules). An individual at a taken index with another genome, or a second, different fitness for
      the same individual, is an error.
    * **One writer per search, any number of searches and readers.** Several processes may share one store; readers see
      committed data and never block the writer.
    * **Plain values.** Frozen records go in and come out; nothing that comes out is tied to a connection.
    * **Errors.** Whatever goes wrong is a `StoreError` with a one-line message.

    A `Store` may be used from several threads. Use it as a context manager, or call `close()`.
    """

    @classmethod
    def open(cls, url: str, create: bool = True) -> Store:
        """Opens the store at `url` (`sqlite:///file.db`, `postgresql://user@host/name`), bringing its schema up to date.

        Args:
            create: make the store where there is none. False: a missing store is an error and nothing is created.

        Raises:
            StoreError: wrong URL, unreachable database, missing folder or store, a database that isn't a store of
                moevolve, or a store of a schema version this software doesn't know. The database is left untouched.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Gives back all connections. Closing twice is harmless."""
        raise NotImplementedError

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def create_search(self, search: SearchRecord, tasks: Sequence[SearchTaskRecord]) -> None:
        """Adds a search with its task splits.

        Raises:
            StoreError: the id or the name is taken (also crosswise), or the name is empty or has a `:` in it.
        """
        raise NotImplementedError

    def search(self, name_or_id: str) -> SearchRecord:
        """The search of this id or name.

        Raises:
            StoreError: there is none; names the nearest ones.
        """
        raise NotImplementedError

    def searches(self) -> list[SearchSummary]:
        """All searches with their counts, oldest first."""
        raise NotImplementedError

    def search_tasks(self, search_id: str) -> list[SearchTaskRecord]:
        """The task splits of a search, in the order they were given."""
        raise NotImplementedError

    def set_status(self, search_id: str, status: SearchStatus, reason: str | None = None) -> None:
        """Changes the status of a search and replaces its reason.

        Raises:
            StoreError: unknown search or status.
        """
        raise NotImplementedError

    def record(
        self,
        search_id: str,
        individuals: Sequence[IndividualRecord] = (),
        evaluations: Sequence[EvaluationRecord] = (),
        fitness: Sequence[FitnessRecord] = (),
    ) -> None:
        """Writes a batch of a search's progress in one transaction; the hot path of the driver.

        A fitness may belong to an individual of the same batch or of an earlier one. Parents must be recorded before
        or in the same batch.

        Raises:
            StoreError: unknown search; an index taken by another genome; a parent or a fitness of an individual that
                isn't recorded; a second, different fitness; a score that isn't a finite number. Nothing is written.
        """
        raise NotImplementedError

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
        raise NotImplementedError

    def history(self, search_id: str) -> list[HistoryRow]:
        """All individuals of a search by index, as resume needs them. Gaps and pending rows are given as they are."""
        raise NotImplementedError

    def individual(self, ref: str) -> IndividualDetail:
        """The individual `SEARCH:INDEX` (search name or id), with its evaluations and exports.

        Raises:
            StoreError: the reference isn't of that form, or names no search or individual; names the nearest ones.
        """
        raise NotImplementedError

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
        raise NotImplementedError

    def best_of_search(self, search_id: str, limit: int = 1) -> list[HistoryRow]:
        """The best `ok` individuals of a search by (fitness desc, tie_break desc, index asc), each phenotype once."""
        raise NotImplementedError

    def pareto(self, task: str, split: Split = "search", search: str | None = None) -> list[BestRow]:
        """The configurations that no other beats in both score and parameters, from fewest parameters to most."""
        raise NotImplementedError

    def ancestors(self, ref: str, max_depth: int | None = None) -> LineageGraph:
        """The individual `SEARCH:INDEX` and all it descends from, at most `max_depth` generations back."""
        raise NotImplementedError

    def descendants(self, ref: str, max_depth: int | None = None) -> LineageGraph:
        """The individual `SEARCH:INDEX` and all that descend from it, at most `max_depth` generations on."""
        raise NotImplementedError

    def add_export(self, ref: str, export: ExportRecord) -> None:
        """Notes that an individual was exported. The same path again replaces the earlier note."""
        raise NotImplementedError

    def exports(self, ref: str) -> list[ExportRecord]:
        """The exports of an individual, oldest first."""
        raise NotImplementedError
