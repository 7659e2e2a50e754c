"""The contract of strategies, and initial individuals, which all strategies make alike."""

from __future__ import annotations

from collections.abc import Container
from typing import Any, Protocol

import numpy as np

from moevolve.search.genomes.contract.base import GenomeSpace, Offspring
from moevolve.search.genomes.registry import baseline_offspring
from moevolve.search.settings.phases import START, PhaseConfig
from moevolve.store.records import IndividualRecord

DRAWS = 32
"""Number of draws for one individual; if all of them repeat earlier individuals, the last is taken."""


class Strategy(Protocol):
    """Makes the individuals of a search.

    Before `ask(i)` the caller tells exactly the individuals 0 .. visible(i) - 1, in order, and it asks for every index
    once, in order. So a strategy's answers are a function of (config, seed, evaluations of those individuals), and
    repeating the same calls rebuilds its state: resume is replay. The genomes of all individuals before i, unlike their
    scores, are such a function too, so a strategy may use `taken`.
    """

    def tell(self, individual: IndividualRecord) -> None:
        """Add one evaluated individual to the history."""
        ...

    def ask(self, index: int, taken: Container[str]) -> Offspring[Any]:
        """Make individual `index`.

        Args:
            index: Index of the individual in its search.
            taken: Phenotype hashes of all individuals before it, evaluated or not.
        """
        ...

    def skip(self, index: int) -> None:
        """Change the state as `ask` does, for an individual that is stored already."""
        ...


class PhaseStrategy(Protocol):
    """Makes the individuals of one phase; calls come in the same order as those of `Strategy`.

    `initial` is true for the phase's initial individuals. `start` is the best visible individual of the nearest earlier
    phase that has one.
    """

    def tell(self, individual: IndividualRecord) -> None:
        """Add one evaluated individual of this phase to the history."""
        ...

    def tell_before(self, individual: IndividualRecord) -> None:
        """Add one evaluated individual of an earlier phase to the history."""
        ...

    def ask(self, index: int, initial: bool, start: IndividualRecord | None, taken: Container[str]) -> Offspring[Any]:
        """Make individual `index`; see `Strategy.ask`."""
        ...

    def skip(self, index: int, initial: bool, start: IndividualRecord | None) -> None:
        """Change the state as `ask` does, for an individual that is stored already."""
        ...


def fixed_offspring(space: GenomeSpace[Any], phase: PhaseConfig, place: int) -> Offspring[Any] | None:
    """The individual that the phase's `init` names for a position: a baseline or the method's own start, else None.

    Args:
        space: Genome space, calibrated if it has a recipe.
        phase: Settings of the phase.
        place: Position of the individual in its phase.
    """
    if place >= len(phase.named):
        return None
    name = phase.named[place]
    return space.start(phase) if name == START else baseline_offspring(name, space, phase)


def initial_offspring(
    space: GenomeSpace[Any], phase: PhaseConfig, rng: np.random.Generator, place: int, initial: bool
) -> Offspring[Any] | None:
    """The individual of `fixed_offspring`, else a random one if it is an initial one, else None."""
    return fixed_offspring(space, phase, place) or (space.sample(rng, phase) if initial else None)
