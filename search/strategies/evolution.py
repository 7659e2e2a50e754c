"""EEP's evolutionary loop as a steady-state strategy.

Source: Efficient Expert Pruning (arXiv 2407.00945), Sec. 4.3 and Alg. 1: random initial individuals, parents among the
best, crossover and mutation; the merge phase starts from the best of the prune phase. Unless a phase has
`allow_duplicates`, individuals with the same edit count once among the parents, and a child that repeats an earlier
individual is drawn again, because its score is known.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Container
from dataclasses import replace

import numpy as np

from moevolve.search.genomes.contract.base import Child, Genome, GenomeSpace
from moevolve.search.genomes.contract.operators import generator
from moevolve.search.genomes.contract.phases import MergePhase, PhaseConfig
from moevolve.search.strategies.base import DRAWS, PhaseStrategy, Ranking, eligible, fixed_offspring, rank_key
from moevolve.store.records import IndividualRecord

# The individuals that may become parents by crossover, and those by mutation; both best first.
ParentPools = tuple[list[IndividualRecord], list[IndividualRecord]]


class Evolution(PhaseStrategy):
    """The strategy `evolution` in one phase."""

    def __init__(self, space: GenomeSpace[Genome], phase: PhaseConfig, seed: int, first: int = 0) -> None:
        super().__init__(space, phase, seed, first)
        self._ranking = Ranking(phase.parents, phase.allow_duplicates)
        self._from_all = isinstance(phase, MergePhase) and phase.start == "all"

    def tell(self, individual: IndividualRecord) -> None:
        self._ranking.add(individual)

    def tell_before(self, individual: IndividualRecord) -> None:
        if self._from_all:
            self._ranking.add(individual)

    def ask(self, index: int, initial: bool, start: IndividualRecord | None, taken: Container[str]) -> Child:
        """Draw until the individual is new, at most `DRAWS` times: a small space runs out of new individuals."""
        rng = generator(self._seed, index)
        fixed = fixed_offspring(self._space, self._phase, index - self._first)
        if fixed is not None:
            return fixed
        parents = None if initial else self._parents(start)
        for draw in range(DRAWS):
            offspring = self._bred(rng, parents) if parents else self._sampled(rng, draw)
            if (parents and self._phase.allow_duplicates) or offspring.genome.express().phenotype_hash not in taken:
                break
        return offspring

    def _bred(self, rng: np.random.Generator, parents: ParentPools) -> Child:
        """Return a child of one parent or of two different ones, drawn uniformly."""
        crossover, mutation = parents
        drawn = rng.choice(len(crossover), size=min(2, len(crossover)), replace=False)
        chosen = [crossover[position] for position in drawn]
        if len(chosen) == 1 or rng.random() >= self._phase.crossover_rate:
            chosen = [chosen[0] if mutation == crossover else mutation[int(rng.integers(len(mutation)))]]
        genomes = tuple(self._space.from_bytes(parent.genome) for parent in chosen)
        offspring = self._space.breed(rng, self._phase, genomes)
        return replace(offspring, parents=tuple(chosen[position].index for position in offspring.parents))

    def _sampled(self, rng: np.random.Generator, draw: int) -> Child:
        offspring = self._space.sample(rng, self._phase)
        if draw >= DRAWS // 2:
            # Random genomes may all be equal (without pruning: the identity); then their mutants start the phase.
            offspring = replace(self._space.breed(rng, self._phase, (offspring.genome,)), parents=())
        return offspring

    def _parents(self, start: IndividualRecord | None) -> ParentPools | None:
        """Return the possible parents: the phase's own individuals and `start`; None if there are none."""
        own = list(self._ranking)
        if start is not None and all(one.phenotype_hash != start.phenotype_hash for one in own):
            insort(own, start, key=rank_key)
        if not own:
            return None
        rule = self._phase.parents
        return eligible(own, rule, "crossover"), eligible(own, rule, "mutation")
