"""Strategies by configuration."""

from __future__ import annotations

from typing import Any

from moevolve.search.config import RunConfig
from moevolve.search.config_phases import EvolutionSection
from moevolve.search.genomes.base import GenomeSpace
from moevolve.search.phases import Schedule
from moevolve.search.strategies.base import PhaseStrategy, Strategy
from moevolve.search.strategies.evolution import Evolution
from moevolve.search.strategies.nevergrad import NevergradPhase
from moevolve.search.strategies.phased import Phased


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
