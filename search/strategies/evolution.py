"""EEP's evolutionary loop as a steady-state strategy.

Source: Efficient Expert Pruning (arXiv 2407.00945), Sec. 4.3 and Alg. 1: random initial individuals, parents among the
best, crossover and mutation; the merge phase starts from the best of the prune phase. Individuals of the same genome
count once among the parents.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from moevolve.search.config_phases import PhaseConfig, TopKParents
from moevolve.search.genomes.base import GenomeSpace
from moevolve.search.population import Member, Ranking, eligible
from moevolve.search.rng import generator
from moevolve.search.strategies.base import Proposal
from moevolve.search.strategies.initial import initial_offspring

_ROUNDING = 1e-9
"""More than the rounding of a margin, and less than any example is worth."""


class Evolution:
    """The strategy `evolution` in one phase.

    Args:
        space: where genomes come from.
        position: of the phase among the phases.
        phase: its settings.
        seed: the search's seed.
        first: index of the phase's first individual.
    """

    def __init__(self, space: GenomeSpace[Any], position: int, phase: PhaseConfig, seed: int, first: int = 0) -> None:
        self._space = space
        self._position = position
        self._phase = phase
        self._seed = seed
        self._first = first
        self._ranking = Ranking(phase.parents)

    def tell(self, member: Member) -> None:
        self._ranking.add(member)

    def skip(self, index: int, initial: bool, start: Member | None) -> None:
        """Nothing to do: a proposal leaves no trace here."""

    def floor(self, start: Member | None) -> float | None:
        """What a member needs to be a parent: with either rule that only rises."""
        pool, rule = self._pool(start), self._phase.parents
        if isinstance(rule, TopKParents):
            return pool[rule.k - 1].fitness if len(pool) == rule.k else None
        best = pool[0].fitness if pool else None
        return None if best is None else best - rule.margin - _ROUNDING

    def ask(self, index: int, initial: bool, start: Member | None) -> Proposal:
        rng = generator(self._seed, index)
        pool = self._pool(start)
        place = index - self._first
        offspring = initial_offspring(self._space, self._phase, rng, index, place, initial or not pool)
        if offspring is not None:
            return Proposal(index, self._position, offspring.genome, offspring.operator, (), offspring.note)
        pair = self._draw_parents(rng, pool)
        genomes = tuple(self._space.from_bytes(parent.genome) for parent in pair)
        offspring = self._space.breed(rng, self._phase, genomes)
        parents = tuple(pair[position].index for position in offspring.parents_used)
        return Proposal(index, self._position, offspring.genome, offspring.operator, parents)

    def _pool(self, start: Member | None) -> list[Member]:
        """Possible parents: the phase's own members and the one it started from."""
        own = list(self._ranking)
        if start is not None and all(member.content_hash != start.content_hash for member in own):
            own = sorted([*own, start], key=lambda member: member.key)
        return eligible(own, self._phase.parents)

    @staticmethod
    def _draw_parents(rng: np.random.Generator, pool: list[Member]) -> tuple[Member, ...]:
        """Two different members, uniformly; the only one if there is one."""
        drawn = rng.choice(len(pool), size=min(2, len(pool)), replace=False)
        return tuple(pool[position] for position in drawn)
