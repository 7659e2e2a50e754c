"""Individuals that no history is needed for."""

from __future__ import annotations

from typing import Any

import numpy as np

from moevolve.search.baselines.registry import baseline_offspring
from moevolve.search.config_phases import PhaseConfig
from moevolve.search.genomes.base import GenomeSpace, Offspring


def fixed_offspring(space: GenomeSpace[Any], phase: PhaseConfig, index: int, place: int) -> Offspring[Any] | None:
    """The method's own start as a search's first individual, then the baselines that the phase begins with; else None.

    Args:
        space: where genomes come from; calibrated, if it has a recipe.
        phase: the phase.
        index: of the individual in the search.
        place: of the individual in its phase.
    """
    start = space.start(phase) if index == 0 else None
    if start is None and place < len(phase.baselines):
        return baseline_offspring(phase.baselines[place], space)
    return start


def initial_offspring(
    space: GenomeSpace[Any], phase: PhaseConfig, rng: np.random.Generator, index: int, place: int, initial: bool
) -> Offspring[Any] | None:
    """`fixed_offspring`, or a random one if it is to be an `initial` one; `rng` is the individual's generator."""
    return fixed_offspring(space, phase, index, place) or (space.sample(rng, phase) if initial else None)
