"""What each shortcut saves: times with one of them off, over those with all on."""

from __future__ import annotations

import statistics
import time
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from timed_search import run_timed, unrepaired

from moevolve.evaluators.fitness.scoring import run_split
from moevolve.kernels import products as kernel
from moevolve.search.config.run import RunConfig
from moevolve.search.running.launch import set_up_new
from moevolve.workers.contract.settings import ALL_SHORTCUTS, Shortcuts
from moevolve.workers.engine.engine import GenerationEngine
from moevolve.workers.engine.products import make_rows_independent
from moevolve.workers.worker import EvaluationWorker

_CANDIDATES = 5


def evaluation_shares(config: RunConfig, repeats: int) -> dict[str, float]:
    """Of one evaluation on one thread: medians over random pruning candidates, each evaluated in all ways in turn."""
    config = unrepaired(config)
    setup = set_up_new(config)
    split = setup.prepared["search"][0]
    worker = EvaluationWorker(config.model, config.engine)
    torch.set_num_threads(1)
    resident, settings = worker.resident, config.engine
    ways = {
        "all on": (settings.matmul_backend, ALL_SHORTCUTS),
        "no draft": (settings.matmul_backend, Shortcuts(draft=False)),
        "no common beginnings": (settings.matmul_backend, Shortcuts(prefixes=False)),
    }
    if settings.matmul_backend != "torch" and kernel.onednn_preferred():
        ways["products by torch"] = ("torch", ALL_SHORTCUTS)
    engines = {
        name: GenerationEngine(resident.model, resident.tokenizer, settings, shortcuts)
        for name, (_, shortcuts) in ways.items()
    }
    rng = np.random.default_rng(0)
    genomes = [setup.space.sample(rng, config.phases[0]).genome for _ in range(_CANDIDATES)]
    times: dict[str, list[float]] = {name: [] for name in ways}
    for repeat in range(repeats + 1):
        for genome in genomes:
            with resident.edited(genome.express()):
                for name, engine in engines.items():
                    make_rows_independent(resident.model, ways[name][0])
                    started = time.perf_counter()
                    run_split(engine, split)
                    if repeat:  # the first round warms up
                        times[name].append(time.perf_counter() - started)
    return _over_first(times)


def search_shares(config: RunConfig, evaluations: int, repeats: int) -> dict[str, float]:
    """Of a shorter search's wall time, without repairs: medians of searches run in turns."""
    short = unrepaired(config, evaluations=evaluations)
    workers, engine = short.workers, short.engine
    one = workers.model_copy(update={"count": 1, "num_cpus": workers.count * workers.num_cpus})
    ways = {
        "all on": short,
        "no reuse": _changed(short, workers=workers.model_copy(update={"activation_cache_mb": 0})),
        f"one worker of {workers.count} threads": _changed(
            short, workers=one, engine=replace(engine, threads=workers.count)
        ),
    }
    walls: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repeats):
        for name, changed in ways.items():
            walls[name].append(run_timed(changed, held_out=False).wall)
    return _over_first(walls)


def _changed(config: RunConfig, **sections: Any) -> RunConfig:
    return config.model_copy(update=sections)


def _over_first(times: dict[str, list[float]]) -> dict[str, float]:
    medians = {name: statistics.median(values) for name, values in times.items()}
    first = next(iter(medians.values()))
    return {name: median / first for name, median in medians.items()}
