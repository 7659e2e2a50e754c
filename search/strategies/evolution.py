"""EEP's evolutionary loop as a steady-state strategy.

Source: Efficient Expert Pruning (arXiv 2407.00945), Sec. 4.3 and Alg. 1: random initial individuals, parents among the
best, crossover and mutation; the merge phase starts from the best of the prune phase. Individuals of the same genome
count once among the parents, and a child that repeats an earlier individual is drawn again: it would tell nothing new.
"""

from __future__ import annotations

from collections.abc import Container
from typing import Any

import numpy as np

from moevolve.search.config.phases import PhaseConfig
from moevolve.search.genomes.base import GenomeSpace
from moevolve.search.genomes.rng import generator
from moevolve.search.loop.history import Member, Ranking, eligible
from moevolve.search.strategies.base import Proposal, fixed_offspring

_DRAWS = 32
"""Draws for one individual before it may repeat an earlier one."""


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

    def ask(self, index: int, initial: bool, start: Member | None, taken: Container[str]) -> Proposal:
        """Draw until the individual is new, but not for ever: small spaces run out of new ones."""
        rng = generator(self._seed, index)
        fixed = fixed_offspring(self._space, self._phase, index, index - self._first)
        if fixed is not None:
            return Proposal(index, self._position, fixed.genome, fixed.operator, (), fixed.note)
        pool = self._pool(start)
        for draw in range(_DRAWS):
            proposal = self._draw(rng, index, draw, pool, initial)
            if proposal.genome.express().phenotype_hash not in taken:
                break
        return proposal

    def _draw(self, rng: np.random.Generator, index: int, draw: int, pool: list[Member], initial: bool) -> Proposal:
        if pool and not initial:
            pair = self._draw_parents(rng, pool)
            genomes = tuple(self._space.from_bytes(parent.genome) for parent in pair)
            offspring = self._space.breed(rng, self._phase, genomes)
            parents = tuple(pair[position].index for position in offspring.parents_used)
            return Proposal(index, self._position, offspring.genome, offspring.operator, parents)
        offspring = self._space.sample(rng, self._phase)
        if draw >= _DRAWS // 2:
            # Where random genomes are all alike (without pruning: the identity), mutants of them start the phase.
            offspring = self._space.breed(rng, self._phase, (offspring.genome,))
        return Proposal(index, self._position, offspring.genome, offspring.operator, (), offspring.note)

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
