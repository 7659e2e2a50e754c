"""The contract of strategies, what they share, and who makes initial individuals."""

from __future__ import annotations

from collections.abc import Container
from typing import Any, Protocol

import numpy as np

from moevolve.search.genomes.contract.base import GenomeSpace, Offspring
from moevolve.search.genomes.registry import baseline_offspring
from moevolve.search.settings.phases import START, PhaseConfig
from moevolve.store.records import IndividualRecord

DRAWS = 32
"""Draws for one individual before it may repeat an earlier one."""


class Strategy(Protocol):
    """Makes individuals.

    The caller promises: before `ask(i)` exactly the individuals 0 .. visible(i) - 1 have been told, in order, and every
    index is asked for once, in order. So a strategy's answers are a function of (config, seed, evaluations of those
    individuals), and repeating the same calls rebuilds its state: resume is replay. What the individuals before i are,
    unlike how they score, is such a function too, so `taken` may be looked at.
    """

    def tell(self, individual: IndividualRecord) -> None:
        """Take in one evaluated individual."""
        ...

    def ask(self, index: int, taken: Container[str]) -> Offspring[Any]:
        """Make individual `index`.

        Args:
            taken: phenotype hashes of all individuals before it, evaluated or not.
        """
        ...

    def skip(self, index: int) -> None:
        """Like `ask`, for an individual that is stored already: only the state changes, as if it had been asked for."""
        ...


class PhaseStrategy(Protocol):
    """Makes the individuals of one phase, under the same promise.

    `initial` says whether the individual is one of the phase's initial ones, `start` is the best visible individual of
    the nearest earlier phase that has one.
    """

    def tell(self, individual: IndividualRecord) -> None:
        """Take in one evaluated individual of this phase."""
        ...

    def tell_before(self, individual: IndividualRecord) -> None:
        """Take in one evaluated individual of an earlier phase."""
        ...

    def ask(self, index: int, initial: bool, start: IndividualRecord | None, taken: Container[str]) -> Offspring[Any]:
        """Make individual `index`; see `Strategy.ask`."""
        ...

    def skip(self, index: int, initial: bool, start: IndividualRecord | None) -> None:
        """Like `ask`, for an individual that is stored already."""
        ...


def fixed_offspring(space: GenomeSpace[Any], phase: PhaseConfig, place: int) -> Offspring[Any] | None:
    """One of the individuals that the phase names to begin with: a baseline, or the method's own start; else None.

    Args:
        space: where genomes come from; calibrated, if it has a recipe.
        phase: the phase.
        place: of the individual in its phase.
    """
    if place >= len(phase.named):
        return None
    name = phase.named[place]
    return space.start(phase) if name == START else baseline_offspring(name, space, phase)


def initial_offspring(
    space: GenomeSpace[Any], phase: PhaseConfig, rng: np.random.Generator, place: int, initial: bool
) -> Offspring[Any] | None:
    """`fixed_offspring`, or a random one if it is to be an `initial` one; `rng` is the individual's generator."""
    return fixed_offspring(space, phase, place) or (space.sample(rng, phase) if initial else None)
