"""One search of the search-cost benchmark: the real driver, pool and store, with a clock beside them."""

from __future__ import annotations

import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moevolve.search.config.run import RunConfig
from moevolve.search.genomes.contract.base import Genome
from moevolve.search.loop.evaluation_cache import EvaluationCache
from moevolve.search.loop.search_loop import SearchLoop
from moevolve.search.loop.setup import SearchSetup
from moevolve.search.pools.ray_pool import RayPool
from moevolve.search.running.calibration import calibrated_setup, stored_calibration
from moevolve.search.running.launch import register, set_up_new
from moevolve.search.strategies.phased import make_strategy
from moevolve.store.records import IndividualRecord, Progress
from moevolve.store.repository import Store
from moevolve.workers.contract.settings import ALL_SHORTCUTS, Shortcuts, engine_fingerprint


@dataclass(frozen=True, slots=True)
class Incumbent:
    """The best individual by fitness from some moment on.

    Attributes:
        seconds: since the first request, when it was told.
        place: individuals complete by then, over the search's order where that is asked for.
        held_out: its score on `test`.
    """

    seconds: float
    place: int
    held_out: float


@dataclass(frozen=True)
class TimedSearch:
    """What a search took.

    Attributes:
        wall: seconds from the first request to the last evaluation, and those of a calibration; workers were loaded
            before.
        individuals: of the whole search.
        evaluated: evaluations that were run; the others were known.
        prunings: individuals of the first phase.
        incumbents: in order; fitness never falls, held-out scores may.
        best: fitness of the last of them.
    """

    wall: float
    individuals: int
    evaluated: int
    prunings: int
    incumbents: tuple[Incumbent, ...] = field(repr=False)
    best: float

    def held_out_at(self, seconds: float) -> float:
        """Held-out score of the incumbent at a moment; 0 before there is one."""
        return next((each.held_out for each in reversed(self.incumbents) if each.seconds <= seconds), 0.0)


def unrepaired(config: RunConfig, **changes: Any) -> RunConfig:
    """The same search with random candidates to begin with, and without what repairs; `changes` are of all phases."""
    phases = (phase for phase in config.phases if phase.repair is None)
    changes |= {"init": ("random",)}
    return config.model_copy(update={"phases": tuple(phase.model_copy(update=changes) for phase in phases)})


def run_timed(config: RunConfig, shortcuts: Shortcuts = ALL_SHORTCUTS, held_out: bool = True) -> TimedSearch:
    """Run a search in a store of its own, then score its incumbents on `test`, which is not timed.

    Workers load their model before the clock starts. What a calibration took is added.
    """
    with tempfile.TemporaryDirectory() as folder:
        store = Store.open(f"sqlite:///{Path(folder) / 'store.db'}")
        setup = set_up_new(config)
        register(setup, store)
        model, engine = config.model, config.engine
        pool = RayPool(config.workers, model, engine, setup.all_prepared, shortcuts=shortcuts)
        try:
            setup = calibrated_setup(setup, store, pool.calibrate)
            calibrating = _calibration_seconds(setup, store)
            while pool.ready < config.workers.count:
                pool.poll(0.1)
            cache = EvaluationCache(
                store, pool, setup.search_id, setup.facts.fingerprint, engine_fingerprint(model, engine)
            )
            search = _drive(setup, store, cache, held_out, calibrating)
        finally:
            pool.close()
        store.close()
    return search


def _drive(setup: SearchSetup, store: Store, cache: EvaluationCache, held_out: bool, before: float) -> TimedSearch:
    """Run the search; `before` is what had to be measured first, in seconds."""
    news: list[tuple[float, int]] = []
    last: Progress | None = None
    started = time.perf_counter()

    def watch(progress: Progress) -> None:
        nonlocal last
        last = progress
        if progress.best is not None and (not news or news[-1][1] != progress.best[0]):
            news.append((before + time.perf_counter() - started, progress.best[0]))

    SearchLoop(setup, make_strategy(setup.config, setup.space, setup.schedule), store, cache, watch).run()
    wall = before + time.perf_counter() - started
    assert last is not None and last.best is not None
    rows = {row.index: row for row in store.history(setup.search_id)}
    scores = _test_scores(setup, cache, [rows[index] for _, index in news]) if held_out else {}
    return TimedSearch(
        wall=wall,
        individuals=last.total,
        evaluated=last.evaluated,
        prunings=sum(row.index < setup.schedule.spans[0].stop for row in rows.values()),
        incumbents=tuple(Incumbent(seconds, index, scores.get(index, 0.0)) for seconds, index in news),
        best=last.best[1],
    )


def _calibration_seconds(setup: SearchSetup, store: Store) -> float:
    if setup.space.recipe is None:
        return 0.0
    made = stored_calibration(setup.space.recipe, setup.config, store, setup.search_id, setup.facts.fingerprint)
    assert made is not None and made.seconds is not None
    return made.seconds


def _test_scores(setup: SearchSetup, cache: EvaluationCache, rows: list[IndividualRecord]) -> dict[int, float]:
    """Scores on `test`, by index."""
    genomes: dict[int, Genome] = {row.index: setup.space.from_bytes(row.genome) for row in rows}
    requests = {index: setup.request(genome, setup.splits("test")) for index, genome in genomes.items()}
    settled = {item.request.key: item for item in cache.settle(list(requests.values()))}
    return {index: settled[request.key].evaluations[0].score or 0.0 for index, request in requests.items()}
