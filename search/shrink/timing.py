"""How many candidates a search can try in a given time, by measuring a few of them first."""

from __future__ import annotations

import math
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from itertools import count
from typing import TYPE_CHECKING

from moevolve.evaluators.errors import UserError
from moevolve.search.config.run import RunConfig
from moevolve.search.genomes.contract.phases import PhaseConfig
from moevolve.search.running.launch import set_up_new
from moevolve.search.running.observer import Observer
from moevolve.search.shrink.goal import Goal
from moevolve.search.text import clock, duration
from moevolve.store.records import Progress
from moevolve.store.repository import Store

if TYPE_CHECKING:  # it loads torch
    from moevolve.search.pools.ray_actor import ModelProbe
    from moevolve.search.running.execute import PoolFactory
    from moevolve.search.running.plan.records import Pilot

# Individuals of a pilot. With fewer the mean is too noisy; more delay a short search.
_MEASURED = 4
# Largest number of evaluations, as a multiple of the preset's: none of our searches has gained from more.
_MOST = 10
# Share of the given time after which a pilot is given up: loading, final scores and checks are still to come.
_MEASURING = 0.5
# Rough ratio of total to elapsed time, before candidates are measured.
_UNMEASURED = 4
# Fewest evaluations of a search.
LEAST = 4
# How often a model is loaded after the search: for the checks and the export together, and to time both models.
_LOADS = 3
# Largest ratio of a search's measured to its given time; above it the search is refused.
_LONGEST = 1.2


def plan_time(
    goal: Goal,
    config: RunConfig,
    begun: float,
    probe: ModelProbe,
    make_pool: PoolFactory,
    observer: Observer,
    store: Store | None,
) -> tuple[int, datetime, str]:
    """Measure a few candidates of a search, which are kept for it, and choose how many it can try.

    Args:
        goal: It gives the time of everything from `begun` to the end of the export.
        config: The search.
        begun: When the request was made, in seconds of `time.monotonic`.
        probe: Process that describes the model.
        make_pool: Makes the pool that measures, and then searches.
        observer: Its `on_note` takes when everything will end.
        store: Store that keeps what is measured; None keeps nothing.

    Returns:
        The number of candidates in all phases together, when everything is to end, and the same for people.

    Raises:
        UserError: Even the fewest candidates take much longer, or measuring a few takes most of the time, unless the
            request forces it.
    """
    from moevolve.search.running.plan.pilot import measure

    assert goal.seconds is not None
    option, limit, force = f"--time {goal.request.time}", goal.seconds, goal.request.force
    most = math.inf if force else _MEASURING * limit

    measured = "no candidates"

    def refuse_if_late() -> None:
        elapsed = time.monotonic() - begun
        if elapsed > most:
            raise UserError(
                f"{option}: {_MEASURING:.0%} of it is over, and {measured} are measured; give a longer "
                f"time, such as {enough(_UNMEASURED * elapsed)}, or go on with --force"
            )

    def on_progress(progress: Progress) -> None:
        nonlocal measured
        measured = f"{progress.done} of {progress.total} candidates"
        observer.on_progress(progress)
        refuse_if_late()

    def on_stage(stage: str) -> None:
        observer.on_stage(stage)
        refuse_if_late()

    refuse_if_late()
    started = time.monotonic() - begun
    setup = set_up_new(config, probe.call)
    found = measure(setup, _MEASURED, make_pool, on_stage, on_progress, store, probe.call)
    spent = time.monotonic() - begun
    # The processes that check the winner and time it take about as long to start as those of the search.
    number, takes, sentence = chosen(option, limit, setup.config, found, spent + started + goal.guard_seconds())
    if takes > _LONGEST * limit and not force:
        raise UserError(f"{sentence}; give a longer time, such as {enough(takes)}, or go on with --force")
    observer.on_note(f"{sentence}, until {clock(takes - spent)}")
    return (number, datetime.now(UTC) + timedelta(seconds=takes - spent), sentence)


def shortened(phases: Sequence[PhaseConfig], evaluations: int) -> tuple[PhaseConfig, ...]:
    """Return the phases with so many evaluations together, which the longest one is cut or extended to.

    A few evaluations leave a repair phase after it a quarter of them.
    """
    place, counts = longest(phases), [phase.evaluations for phase in phases]
    for later in range(place + 1, len(phases)):
        counts[later] = min(counts[later], max(1, evaluations // 4))
    counts[place] = max(1, evaluations - sum(counts) + counts[place])
    pairs = zip(phases, counts, strict=True)
    return tuple(
        phase.model_copy(update={"evaluations": count, "initial": min(phase.initial, count)}) for phase, count in pairs
    )


def fewest(phases: Sequence[PhaseConfig]) -> int:
    """The fewest evaluations to which phases can be shortened: all one-shot choices of the longest one are tried."""
    place = longest(phases)
    named = len(phases[place].named)
    return next(number for number in count(LEAST) if shortened(phases, number)[place].evaluations >= named)


def longest(phases: Sequence[PhaseConfig]) -> int:
    """Place of the phase with the most evaluations: before it are formulas, and after it the best are repaired anew."""
    return max(range(len(phases)), key=lambda place: (phases[place].evaluations, place))


def chosen(option: str, limit: float, config: RunConfig, found: Pilot, besides: float) -> tuple[int, float, str]:
    """Choose the number of evaluations from what a few took; see `plan_time`.

    What was calibrated and evaluated isn't again.

    Args:
        option: The option that limits the time of everything, with its value.
        limit: This time, in seconds.
        config: The search.
        found: What a few evaluations took.
        besides: Seconds before the search, and of the guard's answers and of starting processes.

    Returns:
        The number, how many seconds everything takes then, and a sentence about it for people.
    """
    phases = config.phases
    besides += found.final_seconds + _LOADS * max(0.0, found.other_seconds - found.calibration_seconds)

    def takes(evaluations: int) -> float:
        counts = Counter[str]()
        for phase in shortened(phases, evaluations):
            counts[phase.kind] += phase.evaluations
        rest = counts - Counter(found.counts)
        if rest.keys() - {"repair"}:  # which candidates are repaired isn't known before all others are evaluated
            rest["repair"] = counts["repair"]
        return besides + found.searching(rest.items())

    earlier = sum(phase.evaluations for phase in phases) - phases[longest(phases)].evaluations
    least, most = max(fewest(phases), earlier + 1), _MOST * sum(phase.evaluations for phase in phases)
    possible = range(least, most + 1)
    number = possible[max(0, bisect_right(possible, limit, key=takes) - 1)]
    bound = ""
    if takes(number) > limit:
        bound = ", the fewest that there can be, although they take longer"
    elif number == most:
        bound = f", {_MOST} times the preset's, although there is time for more"
    one = found.of(phases[longest(phases)].kind)
    sentence = (
        f"{option}: {number} candidates{bound}; one takes {one:.2g} s on one of {found.workers} workers "
        f"(measured on {found.individuals}), everything about {duration(takes(number))}"
    )
    return number, takes(number), sentence


def enough(seconds: float) -> str:
    """Return a value of --time that is as long or a little longer."""
    return f"{math.ceil(seconds / 60)}m" if seconds < 7200 else f"{math.ceil(seconds / 3600)}h"
