"""The strategy of a repair phase: it repairs the best individuals of the earlier phases anew."""

from __future__ import annotations

from collections.abc import Container
from itertools import chain

from moevolve.search.genomes.contract.base import Child, Offspring
from moevolve.search.genomes.contract.operators import generator
from moevolve.search.genomes.contract.phases import PhaseConfig, RepairPhase
from moevolve.search.genomes.repaired import RepairedGenome, RepairedSpace
from moevolve.search.strategies.base import DRAWS, PhaseStrategy, Ranking
from moevolve.store.records import IndividualRecord


class RepairStrategy(PhaseStrategy):
    """Makes the individuals of a repair phase.

    They are the best individuals of the earlier phases, each genome once, repaired with the phase's settings: first of
    those that were repaired like those of the phase before, whose settings are `before.repair`, then of all. Where
    none is left, a random genome is repaired.
    """

    _space: RepairedSpace
    _phase: RepairPhase

    def __init__(self, space: RepairedSpace, phase: RepairPhase, before: PhaseConfig, seed: int) -> None:
        super().__init__(space, phase, seed)
        self._before = before
        # Twice as many as are repaired: formulas, which an earlier phase may have repaired alike, may be among them.
        most = 2 * phase.evaluations
        self._comparable, self._others = Ranking(most), Ranking(most)

    def tell_before(self, individual: IndividualRecord) -> None:
        genome = self._space.from_bytes(individual.genome)
        # Only scores of candidates that were repaired alike say which of them is better.
        alike = (genome.settings if isinstance(genome, RepairedGenome) else None) == self._before.repair
        (self._comparable if alike else self._others).add(individual)

    def tell(self, individual: IndividualRecord) -> None:
        """Do nothing: the phase's own individuals have no children."""

    def ask(self, index: int, initial: bool, start: IndividualRecord | None, taken: Container[str]) -> Child:
        for base in chain(self._comparable, self._others):
            genome = self._space.repaired(self._space.from_bytes(base.genome), self._phase.repair)
            if genome.express().phenotype_hash not in taken:
                return Offspring(genome, "repair", (base.index,))
        rng = generator(self._seed, index)
        for _ in range(DRAWS):
            offspring = self._space.repair_offspring(self._space.inner.sample(rng, self._before), self._phase)
            if offspring.genome.express().phenotype_hash not in taken:
                break
        return offspring
