"""The part of the history that can still matter: individuals ranked by fitness, ties broken the same way everywhere."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from moevolve.evaluators.metrics import score, weighted_mean
from moevolve.search.config.phases import ThresholdParents, TopKParents
from moevolve.search.genomes.rng import generator
from moevolve.store.records import EvaluationRecord, IndividualRecord

Stored = Mapping[str, Sequence[EvaluationRecord]]
"""Per phenotype hash its evaluations on the tasks' `search` splits, in order, with their outcomes."""
ReadStored = Callable[[Sequence[str]], Stored]
"""From phenotype hashes of individuals that didn't fail to what is stored of them."""

FRESH = 1000
"""With fresh rows so many individuals, the best on all rows, stay possible parents, or 10 times `k` if that is more.

Someone low on all rows may lead on a subset, but not from anywhere: of 200 rows of 400, a difference of two individuals
that answer a fifth of the rows differently has a standard deviation of 2.2 points. This many are all of a usual search;
of a long one they bound what a generation takes (ms) and what outcomes take in memory (MB), whatever its length.
"""
_ROUNDING = 1e-9
"""A score that is a margin below the best is within it, though 0.9 - 0.87 > 0.03 in floats."""
RankKey = tuple[float, float, int]


def rank_key(one: IndividualRecord) -> RankKey:
    """Sorts best first: by fitness, then the tie-break, then the earlier individual.

    Raises:
        ValueError: it failed, or is pending.
    """
    if one.fitness is None or one.tie_break is None:
        raise ValueError(f"individual {one.index} is {one.status}, it has no rank")
    return -one.fitness, -one.tie_break, one.index


def eligible(
    ranked: list[IndividualRecord],
    rule: TopKParents | ThresholdParents,
    operator: Literal["crossover", "mutation"],
    fitness: Mapping[int, float] | None = None,
) -> list[IndividualRecord]:
    """The leading part of `ranked` (best first) that may become parents under `rule`, by what is done to them.

    `fitness` is what they are ranked by, per index, if it isn't their own.
    """
    if isinstance(rule, TopKParents):
        return ranked[: rule.k]
    values = [-rank_key(one)[0] if fitness is None else fitness[one.index] for one in ranked]
    if operator == "mutation":
        return ranked[: _within(values, rule.mutation_margin)]
    return ranked[: max(_within(values, rule.crossover_margin), rule.crossover_least)]


def _within(values: Sequence[float], margin: float) -> int:
    """How many of these, best first, are at most `margin` less than the best."""
    return sum(values[0] - value <= margin + _ROUNDING for value in values)


class FreshRows:
    """Fitness on a random subset of the search rows, drawn anew for every generation.

    The fitness of an individual is the weighted mean over the tasks of its metric on the subset, less its penalty.
    Which rows they are is a function of (seed, index of the generation's first individual). Outcomes are read from the
    store, once per individual and only of those that may become parents: nobody else's are needed to resume a search.

    Args:
        rule: with `rows`, their share of each task's rows, and the length of a generation.
        weights: of the tasks.
        seed: the search's seed.
        first: index of the phase's first individual.
        read: gives what is stored of individuals.
    """

    def __init__(
        self,
        rule: TopKParents | ThresholdParents,
        weights: Sequence[float],
        seed: int,
        first: int,
        read: ReadStored,
    ) -> None:
        assert rule.rows is not None, "a rule without `rows` compares on all of them"
        self._share, self._generation = rule.rows, rule.generation
        self._weights, self._seed, self._first, self._read = weights, seed, first, read
        self._begin = -1
        self._stored: dict[str, Sequence[EvaluationRecord]] = {}
        self._fitness: dict[int, float] = {}

    def fitness(self, index: int, individuals: Sequence[IndividualRecord]) -> Mapping[int, float]:
        """Fitness of individuals that didn't fail, by index, on the rows by which the parents of `index` are picked."""
        begin = index - (index - self._first) % self._generation
        if begin != self._begin:
            hashes = {one.phenotype_hash for one in individuals}
            self._stored = {key: found for key, found in self._stored.items() if key in hashes}
            self._begin, self._fitness = begin, {}
        fresh = [one for one in individuals if one.index not in self._fitness]
        unread = dict.fromkeys(one.phenotype_hash for one in fresh if one.phenotype_hash not in self._stored)
        if unread:
            self._stored |= self._read(tuple(unread))
        if fresh:
            sizes = [len(_outcomes(record)) for record in self._stored[fresh[0].phenotype_hash]]
            rows = fresh_rows(self._seed, begin, sizes, self._share)
            self._fitness |= {one.index: self._on(rows, one) for one in fresh}
        return self._fitness

    def _on(self, rows: Sequence[NDArray[np.int64]], one: IndividualRecord) -> float:
        records = self._stored[one.phenotype_hash]
        whole = weighted_mean([record.score or 0.0 for record in records], self._weights)
        scores = [score(record.metric, _outcomes(record)[chosen]) for record, chosen in zip(records, rows, strict=True)]
        # What all rows give and the fitness lacks is the penalty.
        return weighted_mean(scores, self._weights) - (whole + rank_key(one)[0])


def fresh_rows(seed: int, begin: int, sizes: Sequence[int], share: float) -> list[NDArray[np.int64]]:
    """The rows by which a generation's parents are picked.

    Args:
        seed: the search's seed.
        begin: index of the generation's first individual.
        sizes: rows of each task.
        share: of them, in (0, 1); it is at least one row, and never all where there are two.

    Returns:
        Per task int64 [rows drawn], each row at most once.
    """
    rng = generator(seed, begin, "rows")
    return [rng.permutation(size)[: max(1, min(size - 1, round(share * size)))] for size in sizes]


def _outcomes(record: EvaluationRecord) -> NDArray[np.float32]:
    return np.frombuffer(record.outcomes or b"", dtype="<f4")


class Ranking:
    """Distinct individuals of one phase, best first, cut to those that can still become parents.

    They arrive in order of index. A failed one never enters; neither does a repeat of a genome that is in already,
    unless there may be `repeats`. With either rule one that falls out can't come back, since the best only rises.
    `top_k` keeps k of them; a threshold keeps all within its wider margin, however many they are. With fresh rows
    either keeps the best `FRESH`.
    """

    def __init__(self, rule: TopKParents | ThresholdParents, repeats: bool = False) -> None:
        self._rule = rule
        self._repeats = repeats
        self._individuals: dict[int, IndividualRecord] = {}
        self._keys: list[RankKey] = []
        self._hashes: set[str] = set()

    def __len__(self) -> int:
        return len(self._keys)

    def __iter__(self) -> Iterator[IndividualRecord]:
        return (self._individuals[key[2]] for key in self._keys)

    def add(self, one: IndividualRecord) -> None:
        """Take in one individual and drop what can no longer be a parent."""
        if one.fitness is None or (not self._repeats and one.content_hash in self._hashes):
            return
        insort(self._keys, rank_key(one))
        self._individuals[one.index] = one
        self._hashes.add(one.content_hash)
        while self._surplus():
            dropped = self._individuals.pop(self._keys.pop()[2])
            self._hashes.discard(dropped.content_hash)

    def _surplus(self) -> bool:
        if self._rule.rows is not None:
            least = self._rule.k if isinstance(self._rule, TopKParents) else self._rule.crossover_least
            return len(self._keys) > max(FRESH, 10 * least)
        if isinstance(self._rule, TopKParents):
            return len(self._keys) > self._rule.k
        if len(self._keys) <= self._rule.crossover_least:
            return False
        best, worst = self._keys[0], self._keys[-1]
        return worst[0] - best[0] > max(self._rule.crossover_margin, self._rule.mutation_margin) + _ROUNDING
