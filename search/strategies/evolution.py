"""EEP's evolutionary loop as a steady-state strategy.

Source: Efficient Expert Pruning (arXiv 2407.00945), Sec. 4.3 and Alg. 1: random initial individuals, parents among the
best, crossover and mutation; the merge phase starts from the best of the prune phase. Individuals of the same genome
count once among the parents.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from moevolve.search.config import PhaseConfig
from moevolve.search.genomes.base import GenomeSpace
from moevolve.search.phases import Schedule
from moevolve.search.population import Member, Ranking, eligible
from moevolve.search.rng import generator
from moevolve.search.strategies.base import Proposal


class Evolution:
    """The strategy `evolution`.

    Args:
        space: where genomes come from.
        phases: the phases' settings, in order.
        schedule: index arithmetic of the same phases.
        seed: the search's seed.
    """

    def __init__(self, space: GenomeSpace[Any], phases: tuple[PhaseConfig, ...], schedule: Schedule, seed: int) -> None:
        self._space = space
        self._phases = phases
        self._schedule = schedule
        self._seed = seed
        self._rankings = [Ranking(phase.parents) for phase in phases]

    def tell(self, member: Member) -> None:
        self._rankings[member.phase].add(member)

    def skip(self, index: int) -> None:
        """Nothing to do: a proposal leaves no trace here."""

    def ask(self, index: int) -> Proposal:
        rng = generator(self._seed, index)
        span = self._schedule.span(index)
        phase = self._phases[span.position]
        pool = self._pool(span.position)
        if self._schedule.is_initial(index) or not pool:
            offspring = self._space.sample(rng, phase)
            return Proposal(index, span.position, offspring.genome, offspring.operator, ())
        pair = self._draw_parents(rng, pool)
        genomes = tuple(self._space.from_bytes(parent.genome) for parent in pair)
        offspring = self._space.breed(rng, phase, genomes)
        parents = tuple(pair[position].index for position in offspring.parents_used)
        return Proposal(index, span.position, offspring.genome, offspring.operator, parents)

    def _pool(self, position: int) -> list[Member]:
        """Possible parents: the phase's own members and the best of the nearest earlier phase that has any."""
        own = list(self._rankings[position])
        for earlier in reversed(self._rankings[:position]):
            if len(earlier):
                seed = earlier[0]
                if all(member.content_hash != seed.content_hash for member in own):
                    own = sorted([*own, seed], key=lambda member: member.key)
                break
        return eligible(own, self._phases[position].parents)

    @staticmethod
    def _draw_parents(rng: np.random.Generator, pool: list[Member]) -> tuple[Member, ...]:
        """Two different members, uniformly; the only one if there is one."""
        drawn = rng.choice(len(pool), size=min(2, len(pool)), replace=False)
        return tuple(pool[position] for position in drawn)
