"""Running a study: one search after another on the same workers, each resumable on its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from moevolve.evaluators.errors import UserError
from moevolve.evaluators.types import PreparedSplit
from moevolve.search.config.files import parse_stored_config
from moevolve.search.config.study import Study, StudyCell
from moevolve.search.loop.final_table import FinalTable
from moevolve.search.loop.setup import SearchSetup
from moevolve.search.pools.base import Pool
from moevolve.search.running.execute import execute, ray_pool
from moevolve.search.running.launch import register, set_up_new
from moevolve.search.running.observer import Observer
from moevolve.search.running.resume import set_up_stored
from moevolve.store.errors import StoreError
from moevolve.store.reader import StoreReader
from moevolve.store.records import SearchRecord
from moevolve.store.repository import Store
from moevolve.workers.contract.settings import EngineConfig, ModelConfig


class ExtensiblePool(Pool, Protocol):
    """A pool whose workers can receive more task splits."""

    def add_splits(self, splits: Mapping[str, PreparedSplit]) -> None:
        """Send prepared splits to the workers, by fingerprint."""
        ...


class SharedWorkers:
    """One pool for all searches on the same model and engine; `make` starts it for the first of them."""

    def __init__(self, make: Callable[[SearchSetup], ExtensiblePool]) -> None:
        self._make = make
        self._pool: ExtensiblePool | None = None
        self._model: tuple[ModelConfig, EngineConfig] | None = None

    def lend(self, setup: SearchSetup) -> Pool:
        """Return a pool for one search, with its model loaded and its task splits sent; closing it stops no workers."""
        model = setup.config.model, setup.config.engine
        if self._pool is not None and self._model != model:
            self.close()
        if self._pool is None:
            self._pool, self._model = self._make(setup), model
        else:
            self._pool.add_splits(setup.all_prepared)
        return _LentPool(self._pool)

    def close(self) -> None:
        """Stop the workers and discard what they are evaluating."""
        if self._pool is not None:
            self._pool.close()
        self._pool = None


class _LentPool:
    def __init__(self, pool: Pool) -> None:
        self.submit, self.poll, self.calibrate, self.resize = pool.submit, pool.poll, pool.calibrate, pool.resize

    def close(self) -> None:
        pass


@dataclass(frozen=True, slots=True)
class StudyResult:
    """The result of one search of a study.

    Attributes:
        setup: The search as it was run.
        table: Final table; None if the search failed.
        failure: Reason why the table or the best individual is missing.
    """

    cell: StudyCell
    setup: SearchSetup = field(repr=False)
    table: FinalTable | None = field(repr=False)
    failure: str | None = None


def run_study(
    study: Study,
    store: Store,
    observer: Callable[[int, StudyCell], Observer],
    make_pool: Callable[[SearchSetup], ExtensiblePool] | None = None,
) -> list[StudyResult]:
    """Run every search that isn't finished, and return the results of all.

    A repeated call evaluates nothing again. If a search fails, the others continue.

    Args:
        study: The study.
        store: Store of the searches.
        observer: Makes the observer of a search from the cell's index and the cell.
        make_pool: Starts the workers for a search; None starts them on Ray.

    Raises:
        UserError: A cell can't run, because its settings don't fit its model or tasks, or because the store has a
            search of its name with other settings. It is raised before anything runs.
        PoolError: No worker can be started; a repeated call continues.
    """
    known = {each.search.name: each.search for each in store.searches()}
    setups = [_setup(cell, store, known.get(cell.config.name)) for cell in study.cells]
    for setup in setups:
        if setup.config.name not in known:
            register(setup, store)
    setups = _with_equal_reserve(setups)
    workers = SharedWorkers(make_pool or ray_pool)
    results: list[StudyResult] = []
    try:
        for place, (cell, setup) in enumerate(zip(study.cells, setups, strict=True)):
            try:
                table = execute(setup, store, observer(place, cell), workers.lend)
            except (UserError, StoreError) as error:
                workers.close()
                results.append(StudyResult(cell, setup, None, str(error)))
            else:
                failure = None if table.winner is not None else "every individual failed"
                results.append(StudyResult(cell, setup, table, failure))
    finally:
        workers.close()
    return results


def _with_equal_reserve(setups: Sequence[SearchSetup]) -> list[SearchSetup]:
    """Give all setups the largest memory reserve of any, because the same workers run all searches."""
    beside = max((setup.needed.memory.beside for setup in setups if setup.needed is not None), default=0)
    found = []
    for setup in setups:
        needed = setup.needed
        if needed is not None:
            needed = replace(needed, memory=replace(needed.memory, beside=beside))
        found.append(replace(setup, needed=needed))
    return found


def _setup(cell: StudyCell, store: StoreReader, known: SearchRecord | None) -> SearchSetup:
    if known is None:
        return set_up_new(cell.config)
    if parse_stored_config(known.config, known.name).config_hash != cell.config.config_hash:
        raise UserError(
            f"search {known.name} is in the store with other settings than the study has now; give the study "
            "another name, or use another store"
        )
    # Settings that don't change the population may differ: workers, and what is scored at the end.
    return set_up_stored(store, known.name, lambda _: cell.config)
