"""Individuals that no history is needed for."""

from __future__ import annotations

from typing import Any

import numpy as np

from moevolve.search.config_phases import PhaseConfig
from moevolve.search.genomes.base import GenomeSpace, Offspring


def initial_offspring(
    space: GenomeSpace[Any], phase: PhaseConfig, rng: np.random.Generator, index: int, initial: bool
) -> Offspring[Any] | None:
    """The method's own start as a search's first individual, random ones as initial ones, None for all others."""
    start = space.start(phase) if index == 0 else None
    if start is not None:
        return start
    return space.sample(rng, phase) if initial else None
