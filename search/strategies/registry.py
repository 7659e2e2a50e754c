"""Strategies by configuration."""

from __future__ import annotations

from typing import Any

from moevolve.search.config import RunConfig
from moevolve.search.genomes.base import GenomeSpace
from moevolve.search.phases import Schedule
from moevolve.search.strategies.base import Strategy
from moevolve.search.strategies.evolution import Evolution


def make_schedule(config: RunConfig) -> Schedule:
    """The schedule of a configuration."""
    section = config.strategy
    generation = section.generation if section.mode == "generations" else None
    phases = [(phase.kind, phase.evaluations, phase.initial) for phase in config.phases]
    return Schedule.of(phases, config.window, generation)


def make_strategy(config: RunConfig, space: GenomeSpace[Any], schedule: Schedule) -> Strategy:
    """The strategy of a configuration."""
    return Evolution(space, config.phases, schedule, config.seed)
