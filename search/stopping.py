"""Whether what is known of a candidate puts its floor out of reach."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from moevolve.evaluators.early_stopping import Floor, Tally
from moevolve.store.records import EvaluationRecord


@dataclass(frozen=True, slots=True)
class Stop:
    """Why a candidate was stopped.

    Attributes:
        bound: the most that its fitness could be.
        reason: one line.
    """

    bound: float
    reason: str


def stop_of(floor: Floor, known: Mapping[str, EvaluationRecord], tallies: Mapping[str, Tally]) -> Stop | None:
    """Whether what is known of a candidate puts a floor out of reach.

    Args:
        floor: with what is known of any candidate.
        known: its evaluations by fingerprint of the split.
        tallies: what is known where it was stopped before, likewise.
    """
    certain = floor
    seen = 0
    for split, count in zip(floor.splits, floor.examples, strict=True):
        if split in known:
            score = known[split].score
            if score is None:
                return None  # it failed, and that is what it stays
            certain, seen = certain.knowing(split, score), seen + count
    likely = certain
    for split, tally in tallies.items():
        if split in floor.splits and split not in known:
            certain, seen = certain.knowing(split, tally.most), seen + tally.seen
            likely = likely.knowing(split, tally.most if floor.alpha is None else tally.likely_most(floor.alpha))
    if not likely.out_of_reach:
        return None
    after = f"after {seen} of {sum(floor.examples)} examples"
    needed = f"and {100 * floor.least:.1f} % was needed"
    if certain.out_of_reach:
        return Stop(certain.bound, f"stopped {after}: at most {100 * certain.bound:.1f} %, {needed}")
    level = f"with {100 * (1 - (floor.alpha or 0)):g} % confidence"
    return Stop(certain.bound, f"raced out {after}: at most {100 * likely.bound:.1f} % {level}, {needed}")
