"""The part of the history that can still matter: individuals ranked by fitness, ties broken the same way everywhere."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator
from dataclasses import dataclass, field

from moevolve.search.config.phases import ThresholdParents, TopKParents


@dataclass(frozen=True, slots=True, order=True)
class RankKey:
    """Sorts best first: fitness, then the tie-break, then the earlier individual."""

    negative_fitness: float
    negative_tie_break: float
    index: int

    @classmethod
    def of(cls, fitness: float, tie_break: float, index: int) -> RankKey:
        return cls(-fitness, -tie_break, index)


@dataclass(frozen=True, slots=True)
class Member:
    """One evaluated individual as a strategy sees it.

    Attributes:
        index: index in the search.
        phase: position of its phase.
        genome: serialised genome.
        content_hash: hash of the genome's canonical content.
        fitness: weighted mean score over the tasks' search splits; None if the candidate failed.
        tie_break: what decides between equal fitness, higher is better (see `RunConfig.tie_break`); None if the
            candidate failed.
        phenotype_hash: of what its genome expresses to.
    """

    index: int
    phase: int
    genome: bytes = field(repr=False)
    content_hash: str
    fitness: float | None
    tie_break: float | None
    phenotype_hash: str = ""

    @property
    def key(self) -> RankKey:
        if self.fitness is None or self.tie_break is None:
            raise ValueError(f"individual {self.index} failed, it has no rank")
        return RankKey.of(self.fitness, self.tie_break, self.index)


def eligible(ranked: list[Member], rule: TopKParents | ThresholdParents) -> list[Member]:
    """The leading part of `ranked` (best first) that may become parents under `rule`."""
    if isinstance(rule, TopKParents):
        return ranked[: rule.k]
    return [member for member in ranked if member.key.negative_fitness - ranked[0].key.negative_fitness <= rule.margin]


class Ranking:
    """Distinct individuals of one phase, best first, cut to those that can still become parents.

    Members arrive in order of index. A failed one never enters; neither does a repeat of a genome that is in
    already. With either rule a member that falls out can't come back, since the best only rises. `top_k` keeps k
    members; a threshold keeps all within its margin, however many they are.
    """

    def __init__(self, rule: TopKParents | ThresholdParents) -> None:
        self._rule = rule
        self._members: dict[int, Member] = {}
        self._keys: list[RankKey] = []
        self._hashes: set[str] = set()

    def __len__(self) -> int:
        return len(self._keys)

    def __iter__(self) -> Iterator[Member]:
        return (self._members[key.index] for key in self._keys)

    def add(self, member: Member) -> None:
        """Take in one member and drop what can no longer be a parent."""
        if member.fitness is None or member.content_hash in self._hashes:
            return
        insort(self._keys, member.key)
        self._members[member.index] = member
        self._hashes.add(member.content_hash)
        while self._surplus():
            dropped = self._members.pop(self._keys.pop().index)
            self._hashes.discard(dropped.content_hash)

    def _surplus(self) -> bool:
        if isinstance(self._rule, TopKParents):
            return len(self._keys) > self._rule.k
        best, worst = self._keys[0], self._keys[-1]
        return worst.negative_fitness - best.negative_fitness > self._rule.margin
