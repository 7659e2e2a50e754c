"""A strategy per phase: each phase starts from the best that the phases before it found."""

from __future__ import annotations

from collections.abc import Container, Sequence

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

    def ask(self, index: int, taken: Container[str]) -> Proposal:
        position = self._schedule.span(index).position
        return self._strategies[position].ask(index, self._schedule.is_initial(index), self._start(position), taken)

    def skip(self, index: int) -> None:
        position = self._schedule.span(index).position
        self._strategies[position].skip(index, self._schedule.is_initial(index), self._start(position))

    def _start(self, position: int) -> Member | None:
        return next((best for best in reversed(self._best[:position]) if best is not None), None)
