"""Pilots: how long a search takes, by a few of its individuals."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from moevolve.search.config.run import RunConfig
from moevolve.search.estimate.report import Estimate, Pilot
from moevolve.search.running.execute import PoolFactory
from moevolve.search.running.pilot import Measured, measure


def run_pilot(
    config: RunConfig,
    planned: Estimate,
    individuals: int,
    make_pool: PoolFactory | None = None,
    on_stage: Callable[[str], None] = lambda _: None,
) -> Pilot:
    """Measure a few individuals, and scale to the whole search; see `measure` for the arguments and errors.

    The time of `dev` and `test` is scaled from that of `search` by the number of tokens.
    """
    return _scaled(planned, measure(config, individuals, make_pool, on_stage=on_stage))


def _scaled(planned: Estimate, found: Measured) -> Pilot:
    total = sum(count.different * found.of(count.kind) for count in planned.phases)
    last = found.of(planned.phases[-1].kind)
    tokens = Counter[str]()
    for split in planned.splits:
        tokens[split.split] += split.tokens
    total += last * (planned.ranked * tokens["dev"] + planned.tested * tokens["test"]) / tokens["search"]
    return Pilot(found.individuals, found.workers, found.seconds, total / found.workers / 3600)
