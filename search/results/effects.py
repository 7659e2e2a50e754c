"""What came of the individuals that each operator made in each phase of a search."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, stdev

from moevolve.evaluators.records import short_repr
from moevolve.evaluators.scales import SCALES, Scale, ScaleName
from moevolve.store.reader import StoreReader
from moevolve.store.records import IndividualRecord


@dataclass(frozen=True, slots=True)
class OperatorEffect:
    """What came of the individuals that one operator made in one phase.

    Attributes:
        individuals: Number of individuals with a score.
        bests: Number of them that were better than all individuals before them.
        children: Number of them whose parents have scores.
        better: Number of these children that beat all their parents.
        gain, low, high: Mean of child's score less its best parent's as `Scale.additive`, with its 95 % confidence
            interval (Student's t); None for fewer than two children.
    """

    phase: str
    operator: str
    individuals: int
    bests: int
    children: int = 0
    better: int = 0
    gain: float | None = None
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, slots=True)
class Effects:
    """What came of the individuals of a search.

    Attributes:
        operators: Phase by phase; in each, the operator with most individuals first.
        scale: Scale that gains are shown on.
    """

    __repr__ = short_repr

    search: str
    operators: tuple[OperatorEffect, ...]
    scale: ScaleName


def effects(store: StoreReader, name: str) -> Effects:
    """Tell by phase and operator what came of a search's individuals.

    Raises:
        StoreError: There is no such search.
    """
    search = store.search(name)
    scale = store.scales(search.id).fitness
    made: dict[str, dict[str, list[IndividualRecord]]] = {}
    scores: dict[int, float] = {}
    bests: set[int] = set()
    highest = -math.inf
    for row in store.history(search.id):
        if row.fitness is not None:
            made.setdefault(row.phase, {}).setdefault(row.operator, []).append(row)
            if row.fitness > highest:
                highest = row.fitness
                bests.add(row.index)
            scores[row.index] = row.fitness
    found = [
        _effect(rows, bests, scores, SCALES[scale])
        for operators in made.values()
        for rows in sorted(operators.values(), key=len, reverse=True)
    ]
    return Effects(search.name, tuple(found), scale)


def _effect(
    rows: Sequence[IndividualRecord], bests: Collection[int], scores: Mapping[int, float], scale: Scale
) -> OperatorEffect:
    """Return the effect of the operator that made some individuals; `scores` has every score of the search by index."""
    from scipy.special import stdtrit  # takes a third of a second, and 26 MB in a server

    gains = [
        scale.additive(scores[row.index]) - scale.additive(max(scores[parent] for parent in row.parents))
        for row in rows
        if row.parents and scores.keys() >= set(row.parents)
    ]
    found = OperatorEffect(rows[0].phase, rows[0].operator, len(rows), sum(row.index in bests for row in rows))
    if len(gains) < 2:
        return found
    mean, half = fmean(gains), float(stdtrit(len(gains) - 1, 0.975)) * stdev(gains) / math.sqrt(len(gains))
    better = sum(gain > 0 for gain in gains)
    return replace(found, children=len(gains), better=better, gain=mean, low=mean - half, high=mean + half)
