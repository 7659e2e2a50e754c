"""Launching and resuming searches: from a configuration to a finished store."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from moevolve.evaluators.errors import UserError
from moevolve.evaluators.tasks.prepare import prepare_split
from moevolve.evaluators.tasks.registry import load_task
from moevolve.evaluators.types import PreparedSplit, Split
from moevolve.search.config.files import parse_stored_config
from moevolve.search.config.run import ModelSection, RunConfig, StoredConfig, TaskSection
from moevolve.search.genomes.base import GenomeSpace
from moevolve.search.genomes.registry import check_baselines, make_space
from moevolve.search.loop.driver import Driver, Progress
from moevolve.search.loop.evaluation_cache import EvaluationCache
from moevolve.search.loop.final import Finaliser
from moevolve.search.loop.schedule import make_schedule
from moevolve.search.loop.setup import SearchSetup
from moevolve.search.loop.standings import Standings, standings
from moevolve.search.pools.base import Pool
from moevolve.search.pools.ray_pool import RayPool, calibrate_on_ray
from moevolve.search.service.calibration import Calibrate, calibrated_setup
from moevolve.search.service.weights import check_checkpoint
from moevolve.search.strategies.phased import make_strategy
from moevolve.store.records import SearchRecord, SearchTaskRecord, new_search_id
from moevolve.store.repository import Store
from moevolve.store.session import without_password
from moevolve.workers.config import engine_fingerprint
from moevolve.workers.model.describe import describe_model
from moevolve.workers.model.fingerprint import pinned_revision

PoolFactory = Callable[[SearchSetup], Pool]


@dataclass(frozen=True, slots=True)
class Observer:
    """What a search tells whoever watches it.

    Attributes:
        on_stage: a line about what happens now (loading, re-ranking ...).
        on_progress: where the population stands.
    """

    on_stage: Callable[[str], None] = lambda _: None
    on_progress: Callable[[Progress], None] = lambda _: None


def set_up(config: RunConfig, search_id: str) -> SearchSetup:
    """Check a configuration against its model and tasks, and prepare everything but weights. The store isn't touched.

    Raises:
        UserError: something in the configuration can't be had; the message names the field.
    """
    config = config.model_copy(update={"model": pinned(config.model)})
    facts = describe_model(config.model.to_worker())
    space = make_space(config.genome, facts, config.phases)
    names: list[Split] = ["search"]
    if config.final.rerank:
        names.append("dev")
    if config.final.test:
        names.append("test")
    prepared = {name: tuple(_prepare(task, name) for task in config.tasks) for name in names}
    ranked = [name for name in names if name != "test" and config.tie_break == "agreement"]
    ties: dict[Split, tuple[PreparedSplit, ...]] = {
        name: tuple(_prepare(task, name, "agreement") for task in config.tasks) for name in ranked
    }
    _check_phases(config, space)
    schedule = make_schedule(config)
    make_strategy(config, space, schedule)  # only to see that it can be made
    held_out = tuple(prepare_split(load_task(name), "test") for name in config.final.held_out)
    setup = SearchSetup(config, search_id, facts, space, schedule, prepared, ties, held_out)
    _splits_beside(setup)  # only to see that names tell them apart
    return setup


def _splits_beside(setup: SearchSetup) -> list[SearchTaskRecord]:
    """The splits that are scored beside the fitness: what breaks ties, then held-out tasks.

    Raises:
        UserError: one has the name of another with other examples, so that tables couldn't tell them apart.
    """
    fitness = (item for group in setup.prepared.values() for item in group)
    known = {(item.task, item.split): item.fingerprint for item in fitness}
    beside = []
    for item in (*(twin for group in setup.tie_breakers.values() for twin in group), *setup.held_out):
        if (item.task, item.split) not in known:
            beside.append(SearchTaskRecord(item.task, item.split, item.fingerprint, weight=0.0))
        if known.setdefault((item.task, item.split), item.fingerprint) != item.fingerprint:
            raise UserError(
                f"task {item.task}: its {item.split} split is used twice with different examples (by tasks, "
                "tie_break: agreement, or final.held_out); give both the same counts, or one another name"
            )
    return beside


def pinned(model: ModelSection) -> ModelSection:
    """The same model at the commit that its revision stands for now, so that every worker loads what was described."""
    return model.model_copy(update={"revision": pinned_revision(model.to_worker())})


def _check_phases(config: RunConfig, space: GenomeSpace[Any]) -> None:
    check_baselines(config.phases, space)
    for position, phase in enumerate(config.phases):
        if phase.kind not in space.phase_kinds:
            raise UserError(
                f"phases.{position}.kind: a {phase.kind} phase doesn't suit genome kind {config.genome.kind}; "
                f"use {' or '.join(space.phase_kinds)}"
            )


def ray_pool(setup: SearchSetup) -> RayPool:
    """The pool of a plan's configuration on Ray."""
    config = setup.config
    return RayPool(config.workers, config.model.to_worker(), config.engine.to_worker(), setup.all_prepared)


def register(setup: SearchSetup, store: Store) -> None:
    """Record a new search.

    Raises:
        UserError: the name is taken.
    """
    config = setup.config
    if any(summary.search.name == config.name for summary in store.searches()):
        store_url = shlex.quote(without_password(config.store))
        raise UserError(
            f"search {config.name} exists in {store_url}: continue it with `moevolve resume {config.name} "
            f"--store {store_url}`, or choose another name with --name"
        )
    tasks = [
        SearchTaskRecord(item.task, item.split, item.fingerprint, task.weight)
        for group in setup.prepared.values()
        for task, item in zip(config.tasks, group, strict=True)
    ]
    record = search_record(config, setup.search_id, setup.facts.fingerprint)
    store.create_search(record, [*tasks, *_splits_beside(setup)])


def set_up_stored(
    store: Store, name: str, adjust: Callable[[RunConfig], RunConfig] = lambda config: config
) -> SearchSetup:
    """The setup of a stored search, with settings adjusted that don't change the population.

    Raises:
        UserError: model, tasks or configuration are not what the search was launched with.
        StoreError: no such search.
    """
    record = store.search(name)
    stored = parse_stored_config(record.config)
    if not isinstance(stored, RunConfig):
        raise UserError(f"search {record.name} was imported: there is nothing to resume")
    config = adjust(stored)
    if (config.config_hash, config.name) != (stored.config_hash, stored.name):
        raise UserError("resume: only `workers` and `final` settings may change; others would make it another search")
    setup = set_up(config, record.id)
    check_checkpoint(config.model.path, setup.facts, record)
    launched = {(task.task, task.split): task.task_fingerprint for task in store.search_tasks(record.id)}
    for group in setup.prepared.values():
        for item in group:
            there = launched.get((item.task, item.split))
            if there is None:
                raise UserError(
                    f"task {item.task}, split {item.split}: search {record.name} was launched without it; set "
                    f"final.{'rerank: 0' if item.split == 'dev' else 'test: false'}, or launch another search"
                )
            if there != item.fingerprint:
                raise UserError(f"task {item.task}, split {item.split}: not the data that search {record.name} ran on")
    return setup


def take_back_failures(setup: SearchSetup, store: Store) -> tuple[int, int]:
    """Take a search back to before its failures that no candidate is to blame for: of workers, and of time.

    These individuals are pending again. Those that were made in sight of such a failure are removed, since with other
    scores before them they may come out otherwise; their evaluations stay in the store.

    Returns:
        How many failures were taken back, and how many later individuals are made again.
    """
    history = store.history(setup.search_id)
    blameless = [row.index for row in history if row.status == "failed" and row.failure_kind != "candidate"]
    if not blameless:
        return 0, 0
    schedule = setup.schedule
    first = next((index for index in range(schedule.total) if schedule.visible(index) > blameless[0]), schedule.total)
    store.retry(setup.search_id, first)
    store.set_status(setup.search_id, "interrupted", "to be retried")
    return len(blameless), sum(row.index >= first for row in history)


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
    store.amend_search(setup.search_id, config.canonical_json(), _splits_beside(setup))
    if not finished:
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
        engine = engine_fingerprint(setup.config.model.to_worker(), setup.config.engine.to_worker())
        cache = EvaluationCache(store, pool, setup.search_id, setup.facts.fingerprint, engine)
        if not finished:
            strategy = make_strategy(setup.config, setup.space, setup.schedule)
            Driver(setup, strategy, store, cache, observer.on_progress).run()
        observer.on_stage("re-ranking and final scores")
        Finaliser(setup, store, cache).run()
    finally:
        pool.close()


def _prepare(section: TaskSection, split: Split, fitness: str | None = None) -> PreparedSplit:
    """One split of a task, under another fitness if one is given and isn't the task's own."""
    task = load_task(section.name)
    counts: Any = {name: count for name, count in section.counts.items() if name == split}
    task = task.with_counts(counts) if counts else task
    return prepare_split(task if fitness is None or fitness == task.fitness else task.with_fitness(fitness), split)


def search_record(config: StoredConfig, search_id: str, model_fingerprint: str) -> SearchRecord:
    """A configuration as the store keeps it."""
    return SearchRecord(
        id=search_id,
        name=config.name,
        config=config.canonical_json(),
        config_hash=config.config_hash,
        model_fingerprint=model_fingerprint,
        model_path=config.model.path,
        engine_fingerprint=engine_fingerprint(config.model.to_worker(), config.engine.to_worker()),
        seed=config.seed if isinstance(config, RunConfig) else 0,
        genome_kind=config.genome.kind,
        software_version=version("moevolve"),
    )


def set_up_new(config: RunConfig) -> SearchSetup:
    """`set_up` for a search that is yet to be recorded."""
    return set_up(config, new_search_id())
