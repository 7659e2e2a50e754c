"""A pilot of a search: a few of its individuals are evaluated for real, to tell how long all of them take."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from statistics import mean

from moevolve.evaluators.errors import UserError
from moevolve.search.config.run import FinalSection, RunConfig
from moevolve.search.estimate.estimate import Estimate, Pilot
from moevolve.search.running.execute import PoolFactory, execute, ray_pool
from moevolve.search.running.launch import register, set_up_new
from moevolve.search.running.observer import Observer
from moevolve.store.records import EvaluationRecord
from moevolve.store.repository import Store

_LEAST = 2
"""Individuals of every phase: the first of a worker is slower than those after it."""


def run_pilot(
    planned: Estimate,
    individuals: int,
    make_pool: PoolFactory = ray_pool,
    on_stage: Callable[[str], None] = lambda _: None,
) -> Pilot:
    """Run a search with fewer individuals, in a store that is removed afterwards.

    All phases have their share of the individuals, two at least; nothing is scored on `dev` or `test`, whose time is
    taken from that of `search` by their numbers of tokens.

    Args:
        planned: the search's estimate.
        individuals: how many to evaluate.
        make_pool: the workers; those of the run by default.
        on_stage: told what is happening.

    Raises:
        UserError: the model or the tasks aren't there, or no individual could be evaluated.
        PoolError: no worker can be had.
    """
    with tempfile.TemporaryDirectory(prefix="moevolve-pilot-") as folder:
        config = _shortened(planned.config, individuals, Path(folder))
        setup = set_up_new(config)
        with Store.open(config.store) as store:
            register(setup, store)
            execute(setup, store, Observer(on_stage=lambda stage: on_stage(f"pilot: {stage}")), make_pool)
            kept = [
                (row.phase, store.individual(f"{config.name}:{row.index}").evaluations)
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
    """The whole search, if its individuals take what these took."""
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
    total = sum(count.different * seconds.get(count.kind, slowest) for count in planned.counts)
    ranked, tested = planned.final
    last = seconds.get(planned.counts[-1].kind, slowest)
    tokens = Counter[str]()
    for split in planned.splits:
        tokens[split.split] += split.tokens
    total += last * (ranked * tokens["dev"] + tested * tokens["test"]) / tokens["search"]
    return Pilot(len(found), len(workers), seconds, total / len(workers) / 3600)
