"""Running a recorded search from wherever it stands to its end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from moevolve.search.config.files import parse_stored_config
from moevolve.search.loop.driver import Driver
from moevolve.search.loop.evaluation_cache import EvaluationCache
from moevolve.search.loop.final import Finaliser
from moevolve.search.loop.setup import SearchSetup
from moevolve.search.loop.standings import Standings, standings
from moevolve.search.pools.base import Pool
from moevolve.search.pools.ray_pool import RayPool, calibrate_on_ray
from moevolve.search.service.calibration import Calibrate, calibrated_setup
from moevolve.search.service.observer import Observer
from moevolve.search.service.set_up import splits_beside
from moevolve.search.strategies.phased import make_strategy
from moevolve.store.repository import Store
from moevolve.workers.config import engine_fingerprint

PoolFactory = Callable[[SearchSetup], Pool]


def ray_pool(setup: SearchSetup) -> RayPool:
    """The pool of a search's configuration on Ray."""
    config = setup.config
    return RayPool(config.workers, config.model, config.engine, setup.all_prepared)


def execute(
    setup: SearchSetup,
    store: Store,
    observer: Observer,
    make_pool: PoolFactory = ray_pool,
    calibrate: Calibrate = calibrate_on_ray,
) -> Standings:
    """Run a recorded search from wherever it stands; its status in the store tells how it ended.

    A finished one is not replayed: only final scores are taken, and measured where some are missing. The store keeps
    the `final` settings that the setup has now, for whoever asks for the winner later.

    Raises:
        PoolError: no worker can be had; the search stays resumable.
        KeyboardInterrupt: the user stopped it; the search stays resumable.
    """
    record = store.search(setup.search_id)
    finished = record.status == "finished"
    config = parse_stored_config(record.config).model_copy(update={"final": setup.config.final})
    store.amend_search(setup.search_id, config.canonical_json(), splits_beside(setup))
    if not finished:
        for note in setup.notes:
            observer.on_note(note)
        store.set_status(setup.search_id, "running")
    try:
        _run(setup, store, observer, make_pool, calibrate, finished)
    except KeyboardInterrupt:
        store.set_status(setup.search_id, "interrupted", "stopped by the user")
        raise
    except Exception as error:
        store.set_status(setup.search_id, "failed", f"{type(error).__name__}: {error}")
        raise
    store.set_status(setup.search_id, "finished")
    return standings(store, store.search(setup.search_id), store.history(setup.search_id), setup.facts)


def _run(
    setup: SearchSetup, store: Store, observer: Observer, make_pool: PoolFactory, calibrate: Calibrate, finished: bool
) -> None:
    def measure(*args: Any) -> bytes:
        observer.on_stage("calibrating")
        return calibrate(*args)

    setup = calibrated_setup(setup, store, measure)
    observer.on_stage("starting workers")
    pool = make_pool(setup)
    try:
        engine = engine_fingerprint(setup.config.model, setup.config.engine)
        cache = EvaluationCache(store, pool, setup.search_id, setup.facts.fingerprint, engine)
        if not finished:
            strategy = make_strategy(setup.config, setup.space, setup.schedule)
            Driver(setup, strategy, store, cache, observer.on_progress).run()
        observer.on_stage("re-ranking and final scores")
        Finaliser(setup, store, cache).run()
    finally:
        pool.close()
