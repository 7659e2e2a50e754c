"""Run a comparison: one search after the other on the same workers, each resumable on its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from moevolve.evaluators.errors import UserError
from moevolve.search.calibrating import Calibrate
from moevolve.search.comparing.config import Cell, Comparison
from moevolve.search.comparing.shared_pool import GrowingPool, SharedWorkers
from moevolve.search.config_files import parse_stored_config
from moevolve.search.plan import Plan
from moevolve.search.ray_pool import calibrate_on_ray
from moevolve.search.service import Observer, execute, new_plan, ray_pool, register, resume_plan
from moevolve.search.standings import Standings
from moevolve.store.errors import StoreError
from moevolve.store.records import SearchRecord
from moevolve.store.repository import Store


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one search of a comparison.

    Attributes:
        cell: which it is.
        plan: as it was run.
        report: how it ended; None when it failed.
        failure: why it did.
    """

    cell: Cell
    plan: Plan = field(repr=False)
    report: Standings | None = field(repr=False)
    failure: str | None = None


def run_comparison(
    comparison: Comparison,
    store: Store,
    observer: Callable[[int, Cell], Observer],
    make_pool: Callable[[Plan], GrowingPool] = ray_pool,
    calibrate: Calibrate = calibrate_on_ray,
) -> list[Outcome]:
    """Run every search that isn't finished, and report on all.

    Repeating it evaluates nothing again. A search that fails is reported as failed, and the others go on.

    Args:
        comparison: checked.
        store: where the searches are, or go.
        observer: told of each search, by its place among the cells.
        make_pool: starts the workers.
        calibrate: makes calibrations.

    Raises:
        UserError: before anything runs, when a cell can't be: its settings don't fit its model or tasks, or the store
            has a search of its name with other settings.
        PoolError: no worker can be had; repeat it to go on.
        KeyboardInterrupt: the user stopped it; repeat it to go on.
    """
    known = {each.search.name: each.search for each in store.searches()}
    plans = [_plan(cell, store, known.get(cell.config.name)) for cell in comparison.cells]
    for plan in plans:
        if plan.config.name not in known:
            register(plan, store)
    workers = SharedWorkers(make_pool)

    def calibrate_alone(*args: Any) -> bytes:
        # The workers hold all CPUs or GPUs there are; one that measures would wait for them forever.
        workers.close()
        return calibrate(*args)

    outcomes: list[Outcome] = []
    try:
        for place, (cell, plan) in enumerate(zip(comparison.cells, plans, strict=True)):
            try:
                report = execute(plan, store, observer(place, cell), workers.lend, calibrate_alone)
            except (UserError, StoreError) as error:
                workers.close()
                outcomes.append(Outcome(cell, plan, None, str(error)))
            else:
                failure = None if report.winner is not None else "every individual failed"
                outcomes.append(Outcome(cell, plan, report, failure))
    finally:
        workers.close()
    return outcomes


def _plan(cell: Cell, store: Store, known: SearchRecord | None) -> Plan:
    """The cell's plan, of a search in the store if there is one."""
    if known is None:
        return new_plan(cell.config)
    if parse_stored_config(known.config).config_hash != cell.config.config_hash:
        raise UserError(
            f"search {known.name} is in the store with other settings than the comparison has now; give the comparison "
            "another name, or use another store"
        )
    # What doesn't change the population may differ: workers, and what is scored at the end of the splits it has.
    return resume_plan(store, known.name, lambda _: cell.config)
