"""The schedule of a search: the phase of each individual, and the history it may depend on."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from moevolve.search.config.run import RunConfig


@dataclass(frozen=True, slots=True)
class PhaseSpan:
    """Indices [start, stop) of one phase; the first `initial` are initial individuals."""

    position: int
    kind: str
    start: int
    stop: int
    initial: int


@dataclass(frozen=True)
class Schedule:
    """Arithmetic on indices alone, on which the determinism of a search rests.

    Attributes:
        spans: Phases in order, without gaps.
        window: Child i depends on individuals 0 .. i - window.
        separate: A phase's individuals depend on all individuals of the phases before it, so that these are all
            evaluated before the phase begins. A repair phase's always do, since it repairs the best of them.
    """

    spans: tuple[PhaseSpan, ...]
    window: int
    separate: bool = False

    @classmethod
    def of(cls, phases: Sequence[tuple[str, int, int]], window: int, separate: bool = False) -> Schedule:
        """Build a schedule from (kind, evaluations, initial) triples."""
        stops = list(accumulate(evaluations for _, evaluations, _ in phases))
        starts = [0, *stops][:-1]
        spans = tuple(
            PhaseSpan(position, kind, start, stop, initial)
            for position, ((kind, _, initial), start, stop) in enumerate(zip(phases, starts, stops, strict=True))
        )
        return cls(spans, window, separate)

    @property
    def total(self) -> int:
        """Number of individuals of the whole search."""
        return self.spans[-1].stop

    def span(self, index: int) -> PhaseSpan:
        """Return the phase of individual `index`."""
        return self.spans[bisect_right([span.stop for span in self.spans], index)]

    def is_initial(self, index: int) -> bool:
        """Say whether individual `index` is one of its phase's initial individuals."""
        span = self.span(index)
        return index < span.start + span.initial

    def visible(self, index: int) -> int:
        """Return how many individuals child `index` depends on: exactly 0 .. visible - 1."""
        span = self.span(index)
        waits = self.separate or span.kind == "repair"
        return max(span.start if waits else 0, index - self.window + 1)


def make_schedule(config: RunConfig) -> Schedule:
    """Return the schedule of a configuration."""
    phases = [(phase.kind, phase.evaluations, phase.initial) for phase in config.phases]
    return Schedule.of(phases, config.window, config.skip_phases_at is not None)


# Phases with fewer rounds have few evaluated parents; see the table of windows in `search/loop/README.md`.
FEWEST_ROUNDS = 8


def rounds_notes(config: RunConfig) -> tuple[str, ...]:
    """Return a warning for users for each phase with fewer than `FEWEST_ROUNDS` rounds.

    A round is a window, the number of individuals that are made before the first of them can be a parent. Phases
    without children have no rounds. `capacity` phases need few, since they start from formulas.
    """
    schedule = make_schedule(config)
    size, found = schedule.window, []
    for span in schedule.spans:
        evaluations = span.stop - span.start
        rounds, most = -(-evaluations // size), (evaluations - 1) // (FEWEST_ROUNDS - 1)
        if span.kind == "repair" or span.initial == evaluations or most == 0 or rounds >= FEWEST_ROUNDS:
            continue
        needed = (FEWEST_ROUNDS - 1) * size + 1
        found.append(
            f"warning: phases.{span.position} ({span.kind}) makes {evaluations} individuals in {rounds} rounds of "
            f"{size}, and those of a round can't learn from each other; for {FEWEST_ROUNDS} rounds set window: "
            f"{most}, or phases.{span.position}.evaluations: {needed}"
        )
    return tuple(found)


def largest_window(config: RunConfig, most: int) -> int:
    """Return the largest window up to `most` that gives all phases enough rounds, or 1."""
    windows = range(most, 1, -1)
    return next((each for each in windows if not rounds_notes(config.model_copy(update={"window": each}))), 1)
