"""The contract of a phase's strategy, and what strategies share: ranking, parent selection, named individuals."""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import insort
from collections.abc import Container, Iterator
from typing import Literal

from moevolve.search.genomes.contract.base import Child, Genome, GenomeSpace
from moevolve.search.genomes.contract.phases import START, Parents, PhaseConfig
from moevolve.search.genomes.registry import baseline_offspring
from moevolve.store.records import IndividualRecord

# The EEP authors' numbers, there in percentage points: how far from the best individual in fitness parents may be, and
# how many of the best may be crossed whatever their distance.
_MUTATION_MARGIN = 0.03
_CROSSOVER_MARGIN = 0.01
_CROSSOVER_LEAST = 6
# Tolerance of margins: in floats 0.9 - 0.87 > 0.03.
_ROUNDING = 1e-9
RankKey = tuple[float, float, int]


def rank_key(one: IndividualRecord) -> RankKey:
    """Sort key that puts the best individual first: by fitness, then the tie-break, then the smaller index.

    Raises:
        ValueError: The individual failed or is pending.
    """
    if one.fitness is None or one.tie_break is None:
        raise ValueError(f"individual {one.index} is {one.status}, it has no rank")
    return -one.fitness, -one.tie_break, one.index


def eligible(
    ranked: list[IndividualRecord], rule: Parents, operator: Literal["crossover", "mutation"]
) -> list[IndividualRecord]:
    """Return the individuals of `ranked`, best first, that may become parents of an operator under a rule."""
    if isinstance(rule, int):
        return ranked[:rule]
    margin, least = (_MUTATION_MARGIN, 0) if operator == "mutation" else (_CROSSOVER_MARGIN, _CROSSOVER_LEAST)
    values = [-rank_key(one)[0] for one in ranked]
    within = sum(values[0] - value <= margin + _ROUNDING for value in values)
    return ranked[: max(within, least)]


class Ranking:
    """The individuals of one phase that can still become parents, best first.

    Individuals are added in order of index. Failed ones are ignored, and so are repeated edits unless
    `allow_duplicates`. A number keeps as many of the best, and a threshold all within its wider margin. With either
    rule an individual that is dropped can't become a parent later, since the best fitness only rises.
    """

    def __init__(self, rule: Parents, allow_duplicates: bool = False) -> None:
        self._rule, self._allow_duplicates = rule, allow_duplicates
        self._individuals: dict[int, IndividualRecord] = {}
        self._keys: list[RankKey] = []
        self._hashes: set[str] = set()

    def __iter__(self) -> Iterator[IndividualRecord]:
        return (self._individuals[key[2]] for key in self._keys)

    def add(self, one: IndividualRecord) -> None:
        """Add one individual, and drop those that can't become parents."""
        if one.fitness is None or (not self._allow_duplicates and one.phenotype_hash in self._hashes):
            return
        insort(self._keys, rank_key(one))
        self._individuals[one.index] = one
        self._hashes.add(one.phenotype_hash)
        while self._surplus():
            dropped = self._individuals.pop(self._keys.pop()[2])
            self._hashes.discard(dropped.phenotype_hash)

    def _surplus(self) -> bool:
        if isinstance(self._rule, int):
            return len(self._keys) > self._rule
        if len(self._keys) <= _CROSSOVER_LEAST:
            return False
        best, worst = self._keys[0], self._keys[-1]
        return worst[0] - best[0] > _MUTATION_MARGIN + _ROUNDING


# Number of draws for one individual; if all of them repeat earlier individuals, the last is taken.
DRAWS = 32


class PhaseStrategy(ABC):
    """Makes the individuals of one phase; calls come in the same order as those of `PhasedStrategy`.

    Args:
        space: Genome space, calibrated if it has a measurement.
        phase: Settings of the phase.
        seed: Seed of the search.
        first: Index of the phase's first individual.
    """

    def __init__(self, space: GenomeSpace[Genome], phase: PhaseConfig, seed: int, first: int = 0) -> None:
        self._space, self._phase, self._seed, self._first = space, phase, seed, first

    @abstractmethod
    def tell(self, individual: IndividualRecord) -> None:
        """Add one evaluated individual of this phase to the history."""

    def tell_before(self, individual: IndividualRecord) -> None:  # noqa: B027
        """Add one evaluated individual of an earlier phase to the history."""

    @abstractmethod
    def ask(self, index: int, initial: bool, start: IndividualRecord | None, taken: Container[str]) -> Child:
        """Make individual `index`.

        Args:
            index: Index of the individual in its search.
            initial: True for the phase's initial individuals.
            start: The best visible individual of the nearest earlier phase that has one.
            taken: See `PhasedStrategy.ask`.
        """

    def skip(self, index: int, initial: bool, start: IndividualRecord | None) -> None:  # noqa: B027
        """Change the state as `ask` does, for an individual that is stored already."""


def fixed_offspring(space: GenomeSpace[Genome], phase: PhaseConfig, place: int) -> Child | None:
    """Return the baseline or start that the phase's `init` names for a position in the phase; None for the others."""
    if place >= len(phase.named):
        return None
    name = phase.named[place]
    return space.start(phase) if name == START else baseline_offspring(name, space, phase)
