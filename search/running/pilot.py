"""Measuring a search: a few of its individuals are evaluated, in a store that is removed afterwards."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import mean

from moevolve.evaluators.errors import UserError
from moevolve.search.config.run import FinalSection, RunConfig
from moevolve.search.pools.ray_actor import FirstWorker
from moevolve.search.running.execute import PoolFactory, execute, ray_pool
from moevolve.search.running.launch import register, set_up_new
from moevolve.search.running.observer import Observer
from moevolve.search.running.set_up import call_here
from moevolve.store.records import EvaluationRecord
from moevolve.store.repository import Store

_LEAST = 2
"""Fewest individuals of a phase, since a worker's first one is slower than the others."""


@dataclass(frozen=True, slots=True)
class Measured:
    """What a few individuals of a search took.

    Attributes:
        individuals: Number of individuals.
        workers: Number of workers that evaluated them.
        seconds: Mean duration of one evaluation on `search` by kind of phase, making and repairing its candidate
            included.
        other_seconds: Duration of everything else: starting workers, loading the model, calibrating.
    """

    individuals: int
    workers: int
    seconds: Mapping[str, float]
    other_seconds: float

    def of(self, kind: str) -> float:
        """Seconds of one evaluation in a phase; of a phase that wasn't measured, those of the slowest one."""
        return self.seconds.get(kind, max(self.seconds.values()))


def measure(
    config: RunConfig,
    individuals: int,
    make_pool: PoolFactory | None = None,
    first: FirstWorker | None = None,
    on_stage: Callable[[str], None] = lambda _: None,
) -> Measured:
    """Run a search with fewer individuals. Nothing is scored on `dev` or `test`.

    Args:
        config: The search.
        individuals: Number of individuals. Every phase gets its share, at least two.
        make_pool: Makes the pool of workers; None makes it as the run configures it.
        first: Source of that pool's first worker.
        on_stage: Called with a line about each stage.

    Raises:
        UserError: The model or the tasks can't be loaded, or no individual could be evaluated.
        PoolError: No worker can be started.
    """
    with tempfile.TemporaryDirectory(prefix="moevolve-pilot-") as folder:
        short = _shortened(config, individuals, Path(folder))
        setup = set_up_new(short, None, call_here if first is None else first.call)
        begun = time.monotonic()
        with Store.open(short.store) as store:
            register(setup, store)
            observer = Observer(on_stage=lambda stage: on_stage(f"pilot: {stage}"))
            execute(setup, store, observer, make_pool or partial(ray_pool, first=first))
            kept = [
                (row.phase, store.individual(f"{short.name}:{row.index}").evaluations)
                for row in store.history(setup.search_id)
            ]
        return _measured(kept, time.monotonic() - begun)


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


def _measured(found: list[tuple[str, tuple[EvaluationRecord, ...]]], wall: float) -> Measured:
    """Summarise (phase, evaluations) of the individuals, which took `wall` seconds in all."""
    taken: dict[str, list[float]] = {}
    workers = set()
    for phase, evaluations in found:
        searched = [one for one in evaluations if one.split == "search" and one.failure is None]
        if searched:
            taken.setdefault(phase, []).append(sum(one.seconds for one in searched))
            workers |= {one.worker for one in searched}
    if not taken:
        raise UserError("pilot: no individual could be evaluated; `moevolve launch` says why")
    busy = sum(map(sum, taken.values())) / len(workers)
    return Measured(len(found), len(workers), {kind: mean(each) for kind, each in taken.items()}, max(0, wall - busy))
