"""A strategy per phase: each phase starts from the best that the phases before it found."""

from __future__ import annotations

from collections.abc import Sequence

from moevolve.search.phases import Schedule
from moevolve.search.population import Member
from moevolve.search.strategies.base import PhaseStrategy, Proposal


class Phased:
    """The strategy of a whole search.

    Args:
        strategies: one per phase, in order.
        schedule: index arithmetic of the same phases.
    """

    def __init__(self, strategies: Sequence[PhaseStrategy], schedule: Schedule) -> None:
        self._strategies = tuple(strategies)
        self._schedule = schedule
        self._best: list[Member | None] = [None] * len(self._strategies)
        self._told = 0

    def tell(self, member: Member) -> None:
        self._told += 1
        best = self._best[member.phase]
        if member.fitness is not None and (best is None or member.key < best.key):
            self._best[member.phase] = member
        self._strategies[member.phase].tell(member)

    def ask(self, index: int) -> Proposal:
        position = self._schedule.span(index).position
        return self._strategies[position].ask(index, self._schedule.is_initial(index), self._start(position))

    def skip(self, index: int) -> None:
        position = self._schedule.span(index).position
        self._strategies[position].skip(index, self._schedule.is_initial(index), self._start(position))

    def floor(self, index: int) -> float | None:
        """What the phase needs of a parent, or a later one of its start, whichever is less.

        None for initial individuals: baselines and random draws are what the others are compared with.
        """
        span = self._schedule.span(index)
        if self._schedule.is_initial(index):
            return None
        # While individuals of earlier phases are on their way, another start may yet take this one's place.
        start = self._start(span.position) if self._told >= span.start else None
        least = self._strategies[span.position].floor(start)
        if least is None or span.position == len(self._strategies) - 1:
            return least
        best = self._best[span.position]
        return None if best is None or best.fitness is None else min(least, best.fitness)

    def _start(self, position: int) -> Member | None:
        return next((best for best in reversed(self._best[:position]) if best is not None), None)
