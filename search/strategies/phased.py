"""A strategy per phase: each phase starts from the best that the phases before it found."""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Any

from moevolve.search.config.phases import EvolutionSection
from moevolve.search.config.run import RunConfig
from moevolve.search.genomes.base import GenomeSpace
from moevolve.search.loop.history import Member
from moevolve.search.loop.schedule import Schedule
from moevolve.search.strategies.base import PhaseStrategy, Proposal, Strategy
from moevolve.search.strategies.evolution import Evolution
from moevolve.search.strategies.nevergrad import NevergradPhase


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


def make_schedule(config: RunConfig) -> Schedule:
    """The schedule of a configuration."""
    section = config.strategy
    phases = [(phase.kind, phase.evaluations, phase.initial) for phase in config.phases]
    if isinstance(section, EvolutionSection) and section.mode == "generations":
        return Schedule.of(phases, config.window, section.generation)
    return Schedule.of(phases, config.window)


def make_strategy(config: RunConfig, space: GenomeSpace[Any], schedule: Schedule) -> Strategy:
    """The strategy of a configuration: each phase's own, or the search's.

    Raises:
        UserError: a strategy isn't there, or can't do what the configuration asks for.
    """
    phases: list[PhaseStrategy] = []
    for position, phase in enumerate(config.phases):
        section, first = phase.strategy or config.strategy, schedule.spans[position].start
        if isinstance(section, EvolutionSection):
            phases.append(Evolution(space, position, phase, config.seed, first))
        else:
            phases.append(NevergradPhase(space, position, phase, section, config.seed, schedule.in_flight, first))
    return Phased(phases, schedule)
