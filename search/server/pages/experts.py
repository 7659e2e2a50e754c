"""What genomes hold, side by side: the experts that two of them keep."""

from __future__ import annotations

from dataclasses import dataclass

from moevolve.search.genomes.contract.base import Genome
from moevolve.search.genomes.registry import figures_for
from moevolve.search.genomes.repaired import base_genome


@dataclass(frozen=True, slots=True)
class ExpertsRow:
    """The original experts that take part in a group of layers, in one individual, in another, and in both."""

    layers: str
    one: tuple[int, ...]
    other: tuple[int, ...]
    both: tuple[int, ...]


def experts_of(one: Genome, other: Genome) -> list[ExpertsRow]:
    """Which original experts two genomes keep, layers by layers; nothing for kinds without, and for unlike groups."""
    left, right = (figures_for(base_genome(genome)).experts(base_genome(genome)) for genome in (one, other))
    if left.keys() != right.keys():
        return []
    return [
        ExpertsRow(
            layers,
            tuple(sorted(used - right[layers])),
            tuple(sorted(right[layers] - used)),
            tuple(sorted(used & right[layers])),
        )
        for layers, used in left.items()
    ]
