"""Individuals that no history is needed for."""

from __future__ import annotations

from typing import Any

import numpy as np

from moevolve.search.baselines.registry import baseline_offspring
from moevolve.search.config_phases import PhaseConfig
from moevolve.search.genomes.base import GenomeSpace, Offspring


def initial_offspring(
    space: GenomeSpace[Any], phase: PhaseConfig, rng: np.random.Generator, index: int, place: int, initial: bool
) -> Offspring[Any] | None:
    """The method's own start as a search's first individual; the baselines that the phase begins with, then random ones
    as initial ones; None for all others.

    Args:
        space: where genomes come from; calibrated, if it has a recipe.
        phase: the phase.
        rng: the individual's generator.
        index: of the individual in the search.
        place: of the individual in its phase.
        initial: whether it is one of the initial ones.
    """
    start = space.start(phase) if index == 0 else None
    if start is not None:
        return start
    if place < len(phase.baselines):
        return baseline_offspring(phase.baselines[place], space)
    return space.sample(rng, phase) if initial else None
