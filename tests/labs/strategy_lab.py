"""Strategies asked and told as a search does it, without a store or a pool."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import numpy as np
from store_samples import decided

from moevolve.search.genomes.contract.base import GenomeSpace
from moevolve.search.loop.search_loop import individual_record
from moevolve.search.strategies.phased import PhasedStrategy
from moevolve.search.strategies.schedule import Schedule
from moevolve.store.records import IndividualRecord

Score = Callable[[IndividualRecord], tuple[float, float] | None]
"""Fitness and tie-break of an individual; None for one that fails."""


def by_hash(one: IndividualRecord) -> tuple[float, float] | None:
    """Coarse, so that there are ties; one in five fails."""
    digest = hashlib.sha256(one.phenotype_hash.encode()).digest()
    return None if digest[0] % 5 == 0 else (digest[1] % 8 / 8, -float(digest[2] % 4))


def asked_and_told(
    make: Callable[[], PhasedStrategy],
    space: GenomeSpace[Any],
    schedule: Schedule,
    score: Score,
    resumed_at: int | None = None,
    by_position: bool = False,
) -> list[IndividualRecord]:
    """All individuals of a search, with their scores.

    A second strategy skips those before `resumed_at`, and must give the same answers afterwards. With `by_position` an
    individual's phase is its place among the phases instead of its kind.
    """
    strategies = [make()] if resumed_at is None else [make(), make()]
    members: list[IndividualRecord] = []
    taken: set[str] = set()
    told = 0
    for index in range(schedule.total):
        while told < schedule.visible(index):
            for each in strategies:
                each.tell(members[told])
            told += 1
        made = strategies[0].ask(index, taken)
        if resumed_at is not None and index < resumed_at:
            strategies[1].skip(index)
        elif resumed_at is not None:
            assert strategies[1].ask(index, taken) == made
        np.random.random(index % 7)  # noqa: NPY002 - the global generator must not matter
        span = schedule.span(index)
        phase = str(span.position) if by_position else span.kind
        one = individual_record(index, phase, made, space.describe(made.genome), 0)
        members.append(decided(one, *(score(one) or (None,))))
        taken.add(one.phenotype_hash)
    return members
