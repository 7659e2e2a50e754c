"""Pilots: how long a search takes, by a few of its individuals."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from moevolve.evaluators.types import Split
from moevolve.search.config.run import RunConfig
from moevolve.search.estimate.report import Estimate, Pilot
from moevolve.search.running.execute import PoolFactory
from moevolve.search.running.launch import set_up_new
from moevolve.search.running.pilot import Measured, measure


def run_pilot(
    config: RunConfig,
    planned: Estimate,
    individuals: int,
    make_pool: PoolFactory | None = None,
    on_stage: Callable[[str], None] = lambda _: None,
) -> Pilot:
    """Measure a few individuals, and scale to the whole search; see `set_up` and `measure` for the errors."""
    return _scaled(planned, measure(set_up_new(config), individuals, make_pool, on_stage=on_stage))


def _scaled(planned: Estimate, found: Measured) -> Pilot:
    total = sum(count.different * found.of(count.kind) for count in planned.phases) / found.workers
    tokens = Counter[Split]()
    for split in planned.splits:
        tokens[split.split] += split.tokens
    total += found.final(planned.phases[-1].kind, planned.ranked, planned.tested, tokens)
    return Pilot(found.individuals, found.workers, found.seconds, total / 3600)
