"""Run a comparison: one search after the other on the same workers, each resumable on its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from moevolve.evaluators.errors import UserError
from moevolve.evaluators.types import PreparedSplit
from moevolve.search.compare.config import Cell, Comparison
from moevolve.search.config.files import parse_stored_config
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
from moevolve.workers.contract.edits import CalibrationRecipe
from moevolve.workers.contract.messages import EvaluationReply, EvaluationRequest
from moevolve.workers.contract.settings import EngineConfig, ModelConfig


class GrowingPool(Pool, Protocol):
    """A pool that more task splits can be given to."""

    def add_splits(self, splits: Mapping[str, PreparedSplit]) -> None:
        """Make prepared splits known, by fingerprint."""
        ...


class SharedWorkers:
    """One pool for searches on the same model and engine; it starts when something is first measured or evaluated.

    Args:
        make: starts a pool for a setup.
    """

    def __init__(self, make: Callable[[SearchSetup], GrowingPool]) -> None:
        self._make = make
        self._pool: GrowingPool | None = None
        self._loaded: tuple[ModelConfig, EngineConfig] | None = None

    def lend(self, setup: SearchSetup) -> Pool:
        """A pool for one search; closing it leaves the workers up."""
        return _Lent(self, setup)

    def pool(self, setup: SearchSetup) -> GrowingPool:
        """The pool, with the setup's model loaded and its task splits known."""
        wanted = setup.config.model, setup.config.engine
        if self._pool is not None and self._loaded != wanted:
            self.close()
        if self._pool is None:
            self._pool, self._loaded = self._make(setup), wanted
        else:
            self._pool.add_splits(setup.all_prepared)
        return self._pool

    def close(self) -> None:
        """Stop the workers; what they were doing is dropped."""
        if self._pool is not None:
            self._pool.close()
        self._pool = None


class _Lent:
    def __init__(self, workers: SharedWorkers, setup: SearchSetup) -> None:
        self._workers = workers
        self._setup = setup
        self._pool: Pool | None = None

    def submit(self, request: EvaluationRequest) -> None:
        self._started().submit(request)

    def poll(self, timeout: float) -> list[EvaluationReply]:
        return [] if self._pool is None else self._pool.poll(timeout)

    def calibrate(
        self,
        recipe: CalibrationRecipe,
        splits: tuple[PreparedSplit, ...],
        check: Callable[[], object] = lambda: None,
    ) -> bytes:
        return self._started().calibrate(recipe, splits, check)

    def resize(self, count: int, at_once: bool = False) -> None:
        if self._pool is not None:
            self._pool.resize(count, at_once)

    def close(self) -> None:
        self._pool = None

    def _started(self) -> Pool:
        if self._pool is None:
            self._pool = self._workers.pool(self._setup)
        return self._pool


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one search of a comparison.

    Attributes:
        cell: which it is.
        setup: as it was run.
        report: how it ended; None when it failed.
        failure: why it did.
    """

    cell: Cell
    setup: SearchSetup = field(repr=False)
    report: FinalTable | None = field(repr=False)
    failure: str | None = None


def run_comparison(
    comparison: Comparison,
    store: Store,
    observer: Callable[[int, Cell], Observer],
    make_pool: Callable[[SearchSetup], GrowingPool] = ray_pool,
) -> list[Outcome]:
    """Run every search that isn't finished, and report on all.

    Repeating it evaluates nothing again. A search that fails is reported as failed, and the others go on.

    Args:
        comparison: checked.
        store: where the searches are, or go.
        observer: told of each search, by its place among the cells.
        make_pool: starts the workers.

    Raises:
        UserError: before anything runs, when a cell can't be: its settings don't fit its model or tasks, or the store
            has a search of its name with other settings.
        PoolError: no worker can be had; repeat it to go on.
        KeyboardInterrupt: the user stopped it; repeat it to go on.
    """
    known = {each.search.name: each.search for each in store.searches()}
    setups = [_setup(cell, store, known.get(cell.config.name)) for cell in comparison.cells]
    for setup in setups:
        if setup.config.name not in known:
            register(setup, store)
    setups = _beside_all(setups)
    workers = SharedWorkers(make_pool)
    outcomes: list[Outcome] = []
    try:
        for place, (cell, setup) in enumerate(zip(comparison.cells, setups, strict=True)):
            try:
                report = execute(setup, store, observer(place, cell), workers.lend)
            except (UserError, StoreError) as error:
                workers.close()
                outcomes.append(Outcome(cell, setup, None, str(error)))
            else:
                failure = None if report.winner is not None else "every individual failed"
                outcomes.append(Outcome(cell, setup, report, failure))
    finally:
        workers.close()
    return outcomes


def _beside_all(setups: Sequence[SearchSetup]) -> list[SearchSetup]:
    """Workers go from one search to the next: experts leave on a device what any of them needs beside."""
    beside = max((setup.needed.memory.beside for setup in setups if setup.needed is not None), default=0)
    return [
        setup
        if setup.needed is None
        else replace(setup, needed=replace(setup.needed, memory=replace(setup.needed.memory, beside=beside)))
        for setup in setups
    ]


def _setup(cell: Cell, store: StoreReader, known: SearchRecord | None) -> SearchSetup:
    """The cell's setup, of a search in the store if there is one."""
    if known is None:
        return set_up_new(cell.config)
    if parse_stored_config(known.config).config_hash != cell.config.config_hash:
        raise UserError(
            f"search {known.name} is in the store with other settings than the comparison has now; give the comparison "
            "another name, or use another store"
        )
    # What doesn't change the population may differ: workers, and what is scored at the end of the splits it has.
    return set_up_stored(store, known.name, lambda _: cell.config)
