"""How many candidates a search can try in a given time, by measuring a few of them first."""

from __future__ import annotations

import math
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from itertools import count
from typing import TYPE_CHECKING

from moevolve.evaluators.errors import UserError
from moevolve.search.config.run import RunConfig
from moevolve.search.genomes.contract.phases import PhaseConfig
from moevolve.search.interface.opening import opened_store
from moevolve.search.pools.ray_actor import ModelProbe
from moevolve.search.running.execute import PoolFactory
from moevolve.search.running.launch import set_up_new
from moevolve.search.running.observer import Observer
from moevolve.search.shrink.budget import LONGEST, clock, enough, seconds_of
from moevolve.search.shrink.options import ShrinkOptions
from moevolve.search.text import duration
from moevolve.store.records import Progress

if TYPE_CHECKING:  # it loads torch
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
# Time for the answers of the guard: a share of the whole time, or if that isn't limited of the search's.
_GUARD_SHARE, _GUARD_OF_SEARCH = 0.1, 0.25
# Seconds for them at least and at most where the time isn't limited. A loop shows in answers of a hundred tokens.
_GUARD_LEAST, _GUARD_MOST = 60, 1800


def guard_seconds(request: ShrinkOptions, searched: float = 0.0) -> float:
    """How long the guard's answers may take after a search of so many seconds.

    Raises:
        UserError: The time that the request gives them isn't one.
    """
    if request.guard_time is not None:
        return seconds_of(request.guard_time, "--guard-time")
    if request.time is not None:
        return _GUARD_SHARE * seconds_of(request.time)
    return min(max(_GUARD_OF_SEARCH * searched, _GUARD_LEAST), _GUARD_MOST)


def guard_plan(request: ShrinkOptions) -> str:
    """Say how long the guard's answers may take, before the search."""
    limit = f"{guard_seconds(request):.0f} s"
    if request.guard_time is None and request.time is None:
        limit = f"{_GUARD_OF_SEARCH:.0%} of the time that the search takes, but from {limit} to {_GUARD_MOST:,} s"
    return f"then both models answer held-out prompts: at most {limit} (--guard-time), besides loading and repairs"


def plan_time(
    request: ShrinkOptions,
    config: RunConfig,
    begun: float,
    probe: ModelProbe,
    make_pool: PoolFactory,
    observer: Observer,
) -> tuple[int, str]:
    """Measure a few candidates of a search, which are kept for it, and choose how many it can try.

    Args:
        request: It gives the time of everything from `begun` to the end of the export.
        config: The search.
        begun: When the request was made, in seconds of `time.monotonic`.
        probe: Process that describes the model.
        make_pool: Makes the pool that measures, and then searches.
        observer: Its `on_note` takes when everything will end.

    Returns:
        The number of candidates in all phases together, and a sentence about it for people.

    Raises:
        UserError: Even the fewest candidates take much longer, or measuring a few takes most of the time, unless the
            request forces it.
    """
    from moevolve.search.running.plan.pilot import measure

    assert request.time is not None
    most = math.inf if request.force else _MEASURING * seconds_of(request.time)

    measured = "no candidates"

    def refuse_if_late() -> None:
        elapsed = time.monotonic() - begun
        if elapsed > most:
            raise UserError(
                f"--time {request.time}: {_MEASURING:.0%} of it is over, and {measured} are measured; give a longer "
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
    store = config.store if request.store is None else request.store
    with nullcontext() if request.dry_run else opened_store(store, create=True) as keep:
        found = measure(setup, _MEASURED, make_pool, on_stage, on_progress, keep, probe.call)
    spent = time.monotonic() - begun
    # The processes that check the winner and time it take about as long to start as those of the search.
    besides = spent + started + guard_seconds(request)
    number, takes, sentence = chosen(request.time, setup.config, found, besides)
    if takes > LONGEST * seconds_of(request.time) and not request.force:
        raise UserError(f"{sentence}; give a longer time, such as {enough(takes)}, or go on with --force")
    observer.on_note(f"{sentence}, until {clock(takes - spent)}")
    return number, sentence


def shortened(phases: Sequence[PhaseConfig], evaluations: int) -> tuple[PhaseConfig, ...]:
    """The phases with so many evaluations together, which the longest one is cut or extended to.

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


def chosen(text: str, config: RunConfig, found: Pilot, besides: float) -> tuple[int, float, str]:
    """Choose the number of evaluations from what a few took; see `plan_time`.

    What was calibrated and evaluated isn't again.

    Args:
        text: The time that there is for everything.
        config: The search.
        found: What a few evaluations took.
        besides: Seconds before the search, and of the guard's answers and of starting processes.

    Returns:
        The number, how many seconds everything takes then, and a sentence about it for people.
    """
    phases = config.phases
    besides += found.final_seconds + _LOADS * max(0.0, found.other_seconds - found.calibration_seconds)
    besides += found.of(phases[-1].kind)  # the winner is made once more, for the checks

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
    number = possible[max(0, bisect_right(possible, seconds_of(text), key=takes) - 1)]
    bound = ""
    if takes(number) > seconds_of(text):
        bound = ", the fewest that there can be, although they take longer"
    elif number == most:
        bound = f", {_MOST} times the preset's, although there is time for more"
    one = found.of(phases[longest(phases)].kind)
    sentence = (
        f"--time {text}: {number} candidates{bound}; one takes {one:.2g} s on one of {found.workers} workers "
        f"(measured on {found.individuals}), everything about {duration(takes(number))}"
    )
    return number, takes(number), sentence
