"""Running a recorded search from its present state to its end."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path

from moevolve.evaluators.types import PreparedSplit
from moevolve.search.loop.evaluation_cache import EvaluationCache
from moevolve.search.loop.final_table import FinalTable, build_final_table, evaluate_final_table, winner_of
from moevolve.search.loop.search_loop import SearchLoop
from moevolve.search.loop.setup import SearchSetup
from moevolve.search.pools.base import ControlledPool, Pool, StopRequested
from moevolve.search.pools.ray_actor import ModelProbe
from moevolve.search.pools.ray_pool import RayPool
from moevolve.search.running.calibration import calibrated_setup
from moevolve.search.running.feeding import feeding_loggers
from moevolve.search.running.lease_heartbeat import LEASE_S, LeaseHeartbeat
from moevolve.search.running.observer import Observer
from moevolve.search.strategies.phased import make_strategy
from moevolve.store.errors import CancelledError, LeaseLostError
from moevolve.store.events import asker
from moevolve.store.records import Lease, Progress, SearchRecord
from moevolve.store.repository import Store
from moevolve.workers.contract.edits import Measurement
from moevolve.workers.contract.settings import engine_fingerprint

log = logging.getLogger(__name__)

_PAUSED = "paused"

PoolFactory = Callable[[SearchSetup], Pool]


def ray_pool(setup: SearchSetup, probe: ModelProbe | None = None, fits: Path | None = None) -> RayPool:
    """Return the pool of a search's configuration on Ray.

    Args:
        setup: The search.
        probe: Source of the first worker, if that is there already.
        fits: Folder of fitted layers that workers on this machine share; None for none.
    """
    config, splits = setup.config, setup.all_prepared
    return RayPool(config.workers, config.model, config.engine, splits, needed=setup.needed, probe=probe, fits=fits)


def execute(
    setup: SearchSetup,
    store: Store,
    observer: Observer,
    make_pool: PoolFactory | None = None,
    probe: ModelProbe | None = None,
) -> FinalTable:
    """Run a recorded search from its present state to its end, and record its status.

    A finished search isn't replayed; only missing final scores are evaluated, and if none is missing no worker starts.
    The store keeps the setup's `final` settings, which later queries for the winner use. During the run, this process
    holds the search's lease and carries out its desired state.

    Args:
        setup: The search.
        store: Store of the search.
        observer: Observer of the search.
        make_pool: Makes the pool; None makes a pool on Ray.
        probe: Source of that pool's first worker.

    Raises:
        CancelledError: The search was cancelled.
        LeaseHeldError: Another process runs the search.
        LeaseLostError: Another process has taken the search over.
        NoRoomError: The model doesn't fit on any worker; the search has failed, and can be resumed with other
            `workers`.
        PoolError: No worker is available; the search stays resumable.
        KeyboardInterrupt: The user stopped the search, which stays resumable unless it was cancelled.
    """
    with (
        LeaseHeartbeat(store, setup.search_id, LEASE_S) as heartbeat,
        feeding_loggers(setup, store, observer) as observer,
    ):
        lease = heartbeat.lease
        record = check_not_cancelled(store, lease)  # its status is the last driver's
        log.info("%s runs it from now on, for the %d. time", lease.owner, lease.epoch)
        finished = record.status == "finished"
        store.note(setup.search_id, "asked", f"to run, by {asker()}")
        store.amend_search(lease, setup.config.stored_over(record.config), setup.auxiliary_tasks)
        if not finished:
            for note in setup.notes:
                observer.on_note(note)
            store.set_status(lease, "running")
        try:
            _run(setup, store, heartbeat, observer, make_pool or partial(ray_pool, probe=probe), finished)
        except StopRequested as asked:
            store.set_status(lease, asked.status, "on request")
            raise
        except KeyboardInterrupt:
            store.set_status(lease, "interrupted", "stopped by the user")
            raise
        except LeaseLostError:
            raise
        except Exception as error:
            store.set_status(lease, "failed", f"{type(error).__name__}: {error}")
            raise
        winner, _ = winner_of(store, record, setup.config)
        store.set_status(lease, "finished", winner=None if winner is None else winner.index)
        log.info("finished")
    return build_final_table(store, store.search(setup.search_id), setup.config, store.history(setup.search_id))


def check_not_cancelled(store: Store, lease: Lease) -> SearchRecord:
    """Return the record of a search whose lease this process holds.

    Raises:
        CancelledError: The search was cancelled meanwhile, or its last driver ended before it read the request.
    """
    if store.control(lease.search_id).desired_state == "cancelled":
        store.set_status(lease, "cancelled", "on request")
    record = store.search(lease.search_id)
    refuse_cancelled(record)
    return record


def refuse_cancelled(record: SearchRecord) -> None:
    """Raise CancelledError if a search was cancelled, which is final."""
    if record.status == "cancelled":
        raise CancelledError(
            f"search {record.name} was cancelled: what it evaluated is in the store; launch another one"
        )


def _run(
    setup: SearchSetup,
    store: Store,
    heartbeat: LeaseHeartbeat,
    observer: Observer,
    make_pool: PoolFactory,
    finished: bool,
) -> None:
    last = ""

    def on_stage(stage: str) -> None:
        nonlocal last
        if stage != _PAUSED:
            last = stage
        log.info(stage)
        heartbeat.stage = stage
        observer.on_stage(stage)

    def on_progress(progress: Progress) -> None:
        heartbeat.progress = progress
        observer.on_progress(progress)

    def on_pause(paused: bool) -> None:
        on_stage(_PAUSED if paused else last)
        store.set_status(heartbeat.lease, "paused" if paused else "running")

    most = setup.config.workers.most(setup.schedule.window)
    pool = ControlledPool(
        partial(make_pool, setup),
        lambda control: most if control.workers is None else control.workers,
        lambda: heartbeat.control,
        on_pause,
    )

    def measure(measurement: Measurement, splits: tuple[PreparedSplit, ...]) -> bytes:
        on_stage("calibrating")
        return pool.calibrate(measurement, splits)

    try:
        if not finished:
            on_stage("starting workers")
            pool.start()
        setup = calibrated_setup(setup, store, measure, observer.on_note)
        engine = engine_fingerprint(setup.config.model, setup.config.engine)
        cache = EvaluationCache(store, pool, heartbeat.lease, setup.facts.fingerprint, engine)
        if not finished:
            strategy = make_strategy(setup.config, setup.space, setup.schedule)
            on_stage("evaluating")
            SearchLoop(setup, strategy, store, cache, on_progress, observer.on_note).run()
        on_stage("re-ranking and final scores")
        evaluate_final_table(setup, store, cache)
    finally:
        pool.close()
