"""The strategy of a repair phase: it repairs the best individuals of the earlier phases, and varies their settings."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from moevolve.search.genomes.contract.base import Genome, Offspring
from moevolve.search.genomes.contract.operators import generator
from moevolve.search.genomes.contract.phases import PhaseConfig, RepairPhase, TopKParents
from moevolve.search.genomes.repaired import RepairedGenome, RepairedSpace
from moevolve.search.strategies.base import DRAWS, PhaseStrategy, Ranking, eligible
from moevolve.store.records import IndividualRecord


class RepairStrategy(PhaseStrategy):
    """Makes the individuals of a repair phase.

    The initial individuals are the best ones of the earlier phases that don't have the phase's settings yet, repaired
    with these; the bases are the best ones of all. A child mutates the settings of one of the phase's best; with
    `crossover_rate` it applies them to another base. `before` are the settings of the phase before it.
    """

    _space: RepairedSpace
    _phase: RepairPhase

    def __init__(self, space: RepairedSpace, phase: RepairPhase, before: PhaseConfig, seed: int) -> None:
        super().__init__(space, phase, seed)
        self._before = before
        self._ranking = Ranking(phase.parents)
        self._bases = Ranking(TopKParents(k=phase.initial))
        # Twice as many as are repaired: formulas, which an earlier phase may have repaired alike, may be among them.
        self._cheaper = Ranking(TopKParents(k=2 * phase.initial))

    def tell_before(self, individual: IndividualRecord) -> None:
        self._bases.add(individual)
        genome = self._genome(individual)
        # Beside candidates with the phase's settings, those with cheaper ones would never be among the best.
        if not isinstance(genome, RepairedGenome) or genome.settings != self._phase.repair:
            self._cheaper.add(individual)

    def tell(self, individual: IndividualRecord) -> None:
        self._ranking.add(individual)

    def ask(self, index: int, initial: bool, start: IndividualRecord | None, taken: Container[str]) -> Offspring[Any]:
        """Draw until the individual is new, at most `DRAWS` times."""
        rng, bases = generator(self._seed, index), list(self._bases)
        own = eligible(list(self._ranking), self._phase.parents, "mutation")
        first = self._repaired_base(list(self._cheaper), taken) if initial else None
        if first is not None:
            return first
        for _ in range(DRAWS):
            # With neither parents nor bases, no earlier individual is visible yet, or all of them failed.
            if own or bases:
                offspring = self._child(rng, bases, own or bases)
            else:
                offspring = self._space.repair_offspring(self._space.inner.sample(rng, self._before), self._phase)
            if offspring.genome.express().phenotype_hash not in taken:
                break
        return offspring

    def _repaired_base(self, bases: Sequence[IndividualRecord], taken: Container[str]) -> Offspring[Any] | None:
        """The best base that isn't yet an individual with the phase's settings."""
        # Better bases may become visible while initial individuals are made.
        for base in bases:
            genome = self._space.repaired(self._genome(base), self._phase.repair)
            if genome.express().phenotype_hash not in taken:
                return Offspring(genome, "repair", (base.index,))
        return None

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
