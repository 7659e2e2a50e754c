"""How many candidates a search can try in a given time, by measuring a few of them first."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from moevolve.evaluators.errors import UserError
from moevolve.search.config.run import RunConfig
from moevolve.search.estimate.counts import final_evaluations
from moevolve.search.loop.setup import SearchSetup
from moevolve.search.pools.ray_actor import FirstWorker
from moevolve.search.running.launch import set_up_new
from moevolve.search.running.pilot import Measured, measure
from moevolve.search.text import duration, quantity

_MEASURED = 4
"""Individuals of a pilot: fewer are too uneven, more delay a short search."""
_MOST = 10
"""Largest number of evaluations, as a multiple of the preset's: none of our searches has gained from more."""
LEAST = 4
"""Fewest evaluations of a search."""
_LOADS = 3
"""How often the model is still loaded after the pilot: by the search, for the checks, and for the export."""

_UNITS = {"s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}


@dataclass(frozen=True, slots=True)
class TimePlan:
    """The number of candidates that a time allows.

    Attributes:
        evaluations: Number of candidates in all phases together.
        text: A sentence about it for people.
    """

    evaluations: int
    text: str


def seconds_of(text: str) -> float:
    """Read a duration such as `2h` or `90min`, in seconds.

    Raises:
        UserError: It isn't one.
    """
    found = quantity(text, _UNITS)
    if found is None:
        raise UserError(f"--time {text}: give a number with a unit, such as 2h, 90min or 1.5d")
    return found


def plan_time(
    text: str, config: RunConfig, begun: float, first: FirstWorker, on_stage: Callable[[str], None]
) -> TimePlan:
    """Measure a few candidates of a search, and choose how many it can try.

    Args:
        text: Time of everything from `begun` to the end of the export.
        config: The search.
        begun: Begin of the request on the clock of `time.monotonic`.
        first: Calls what imports torch.
        on_stage: Called with a line about each stage.

    Raises:
        UserError: See `measure`.
        PoolError: No worker can be started.
    """
    setup = set_up_new(config, None, first.call)
    found = measure(config, _MEASURED, first=first, on_stage=on_stage)
    return chosen(text, setup, found, time.monotonic() - begun)


def chosen(text: str, setup: SearchSetup, found: Measured, spent: float) -> TimePlan:
    """Choose the number of evaluations from what a few took.

    Args:
        text: Time of everything.
        setup: The search as its preset has it.
        found: What a few individuals took.
        spent: Seconds that have passed.
    """
    config, left = setup.config, seconds_of(text) - spent
    *before, last = config.phases
    each = found.of(last.kind) / found.workers
    fixed = _LOADS * found.other_seconds + _final_evaluations(setup) * each
    fixed += sum(phase.evaluations * found.of(phase.kind) for phase in before) / found.workers
    earlier = sum(phase.evaluations for phase in before)
    preset = earlier + last.evaluations
    fitting = earlier + math.floor((left - fixed) / each)
    least = max(LEAST, earlier + 1)
    count = min(max(fitting, least), _MOST * preset)
    bound = ""
    if fitting < least:
        bound = ", the fewest that there can be, although they take longer"
    elif fitting > count:
        bound = f", {_MOST} times the preset's, although there is time for more"
    takes = spent + fixed + (count - earlier) * each
    return TimePlan(
        count,
        f"--time {text}: {count} candidates{bound}; one takes {found.of(last.kind):.2g} s on one of {found.workers} "
        f"workers (measured on {found.individuals}), everything about {duration(takes / 3600)}",
    )


def _final_evaluations(setup: SearchSetup) -> float:
    """The final scores, in evaluations on `search`, by the number of rows."""
    ranked, tested = final_evaluations(setup.config)
    rows = {split: sum(len(task.examples) for task in tasks) for split, tasks in setup.prepared.items()}
    return (ranked * rows.get("dev", 0) + tested * rows.get("test", 0)) / rows["search"]
