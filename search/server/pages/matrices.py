"""What genomes hold, in numbers: the tables that stand beside their drawings."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from moevolve.search.genomes.base import Genome
from moevolve.search.genomes.eep.figures import layers_of
from moevolve.search.genomes.eep.genome import EepGenome
from moevolve.search.genomes.repaired import bare

_LEAST = 1e-6
"""Coefficients below it give an expert no part in another."""


@dataclass(frozen=True, slots=True)
class Matrix:
    """One matrix of a genome.

    Attributes:
        title: which.
        values: its rows.
    """

    title: str
    values: tuple[tuple[float, ...], ...] = field(repr=False)


def matrices_of(genome: Genome) -> list[Matrix]:
    """The matrices of a genome whose kind searches them themselves; none of other kinds."""
    genome = bare(genome)
    if not isinstance(genome, EepGenome):
        return []
    found = []
    for group in range(genome.space.groups):
        for name, matrices in zip(("router mapping", "expert merging"), genome.canonical, strict=True):
            found.append(Matrix(f"{name}, {layers_of(genome, group)}", _rows(matrices[group])))
    return found


def _rows(matrix: NDArray[np.float32]) -> tuple[tuple[float, ...], ...]:
    return tuple(tuple(float(value) for value in row) for row in matrix)


@dataclass(frozen=True, slots=True)
class ExpertsRow:
    """The original experts that take part in a group of layers, in one individual, in another, and in both."""

    layers: str
    one: tuple[int, ...]
    other: tuple[int, ...]
    both: tuple[int, ...]


def experts_of(one: Genome, other: Genome) -> list[ExpertsRow]:
    """Which original experts two genomes keep, layers by layers; nothing for kinds without, and for unlike groups."""
    left, right = bare(one), bare(other)
    if not isinstance(left, EepGenome) or not isinstance(right, EepGenome):
        return []
    if left.space.layer_groups != right.space.layer_groups:
        return []
    rows = []
    for group in range(left.space.groups):
        used, elsewhere = _used(left, group), _used(right, group)
        rows.append(
            ExpertsRow(
                layers_of(left, group),
                tuple(sorted(used - elsewhere)),
                tuple(sorted(elsewhere - used)),
                tuple(sorted(used & elsewhere)),
            )
        )
    return rows


def _used(genome: EepGenome, group: int) -> set[int]:
    parts = np.abs(genome.expert_merging[group]) > _LEAST
    return {int(expert) for expert in np.flatnonzero(parts.any(axis=0))}
