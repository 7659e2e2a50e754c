"""Pilots: evaluating a few individuals of a search to measure how long all of them take."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from statistics import mean

from moevolve.evaluators.errors import UserError
from moevolve.search.config.run import FinalSection, RunConfig
from moevolve.search.estimate.report import Estimate, Pilot
from moevolve.search.running.execute import PoolFactory, execute, ray_pool
from moevolve.search.running.launch import register, set_up_new
from moevolve.search.running.observer import Observer
from moevolve.store.records import EvaluationRecord
from moevolve.store.repository import Store

_LEAST = 2
"""Fewest individuals of a phase, since a worker's first one is slower than the others."""


def run_pilot(
    config: RunConfig,
    planned: Estimate,
    individuals: int,
    make_pool: PoolFactory = ray_pool,
    on_stage: Callable[[str], None] = lambda _: None,
) -> Pilot:
    """Run a search with fewer individuals, in a store that is removed afterwards.

    Every phase gets its share of the individuals, at least two. Nothing is scored on `dev` or `test`: their time is
    scaled from that of `search` by the number of tokens.

    Args:
        config: The search.
        planned: Estimate of the search.
        individuals: Number of individuals to evaluate.
        make_pool: Makes the pool of workers; by default as the run configures it.
        on_stage: Called with a line about each stage.

    Raises:
        UserError: the model or the tasks can't be loaded, or no individual could be evaluated.
        PoolError: no worker can be started.
    """
    with tempfile.TemporaryDirectory(prefix="moevolve-pilot-") as folder:
        short = _shortened(config, individuals, Path(folder))
        setup = set_up_new(short)
        with Store.open(short.store) as store:
            register(setup, store)
            execute(setup, store, Observer(on_stage=lambda stage: on_stage(f"pilot: {stage}")), make_pool)
            kept = [
                (row.phase, store.individual(f"{short.name}:{row.index}").evaluations)
                for row in store.history(setup.search_id)
            ]
    return _scaled(planned, kept)


def _shortened(config: RunConfig, individuals: int, folder: Path) -> RunConfig:
    total = sum(phase.evaluations for phase in config.phases)
    phases = []
    for phase in config.phases:
        share = max(_LEAST, len(phase.named), round(individuals * phase.evaluations / total))
        count = min(share, phase.evaluations)
        phases.append(phase.model_copy(update={"evaluations": count, "initial": min(count, phase.initial)}))
    final = FinalSection(rerank=0, test=False)
    changes = {"phases": tuple(phases), "final": final, "store": f"sqlite:///{folder / 'pilot.db'}"}
    return config.model_copy(update=changes)


def _scaled(planned: Estimate, found: list[tuple[str, tuple[EvaluationRecord, ...]]]) -> Pilot:
    """Extrapolate to the whole search from (phase, evaluations) of the pilot's individuals."""
    taken: dict[str, list[float]] = {}
    workers = set()
    for phase, evaluations in found:
        searched = [one for one in evaluations if one.split == "search" and one.failure is None]
        if searched:
            taken.setdefault(phase, []).append(sum(one.seconds for one in searched))
            workers |= {one.worker for one in searched}
    if not taken:
        raise UserError("--pilot: no individual could be evaluated; `moevolve launch` says why")
    seconds = {phase: mean(each) for phase, each in taken.items()}
    slowest = max(seconds.values())
    total = sum(count.different * seconds.get(count.kind, slowest) for count in planned.phases)
    last = seconds.get(planned.phases[-1].kind, slowest)
    tokens = Counter[str]()
    for split in planned.splits:
        tokens[split.split] += split.tokens
    total += last * (planned.ranked * tokens["dev"] + planned.tested * tokens["test"]) / tokens["search"]
    return Pilot(len(found), len(workers), seconds, total / len(workers) / 3600)
