"""The strategy of a repair phase: the best of the phases before, repaired, and the recipes that suit them varied."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from moevolve.search.config.phases import RepairPhase, TopKParents
from moevolve.search.genomes.base import Genome, Offspring
from moevolve.search.genomes.repaired import RepairedSpace
from moevolve.search.genomes.rng import generator
from moevolve.search.loop.history import Ranking, eligible
from moevolve.search.strategies.base import DRAWS
from moevolve.store.records import IndividualRecord


class Repairing:
    """Individuals of a repair phase.

    The initial ones are the best before the phase, each repaired as the phase says. A child varies the recipe of one of
    the phase's best; now and then it takes another base than that one's.

    Args:
        space: where genomes come from.
        phase: its settings.
        seed: the search's seed.
        first: index of the phase's first individual.
    """

    def __init__(self, space: RepairedSpace, phase: RepairPhase, seed: int, first: int) -> None:
        self._space, self._phase, self._seed, self._first = space, phase, seed, first
        self._ranking = Ranking(phase.parents)
        self._bases = Ranking(TopKParents(k=phase.initial))

    def tell_before(self, individual: IndividualRecord) -> None:
        """Take in one evaluated individual of an earlier phase."""
        self._bases.add(individual)

    def tell(self, individual: IndividualRecord) -> None:
        self._ranking.add(individual)

    def skip(self, index: int, initial: bool, start: IndividualRecord | None) -> None:
        """Nothing to do: what is made leaves no trace here."""

    def ask(self, index: int, initial: bool, start: IndividualRecord | None, taken: Container[str]) -> Offspring[Any]:
        """Draw until the individual is new, but not for ever."""
        rng, bases = generator(self._seed, index), list(self._bases)
        own = eligible(list(self._ranking), self._phase.parents)
        if not bases and not own:
            # Nothing that was evaluated before may be seen yet, or all of it failed.
            return self._space.made(self._space.inner.sample(rng, self._phase), self._phase)
        place = index - self._first
        if initial and place < len(bases):
            genome = self._space.repaired(self._genome(bases[place]), self._phase.repair)
            return Offspring(genome, "repair", (bases[place].index,))
        for _ in range(DRAWS):
            offspring = self._child(rng, bases, own or bases)
            if offspring.genome.express().phenotype_hash not in taken:
                break
        return offspring

    def _child(
        self, rng: np.random.Generator, bases: Sequence[IndividualRecord], parents: Sequence[IndividualRecord]
    ) -> Offspring[Any]:
        parent = parents[int(rng.integers(len(parents)))]
        used = [parent]
        if bases and rng.random() < self._phase.crossover_rate:
            used = [bases[int(rng.integers(len(bases)))], parent]
        offspring = self._space.breed(rng, self._phase, tuple(map(self._genome, used)))
        return replace(offspring, parents=tuple(dict.fromkeys(one.index for one in used)))

    def _genome(self, individual: IndividualRecord) -> Genome:
        return self._space.from_bytes(individual.genome)
