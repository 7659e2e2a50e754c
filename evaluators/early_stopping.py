"""When a candidate may be given up: what its fitness can still come to, and what it would have to come to.

A score that is a mean of outcomes in [0, 1] can't end above what it is with every outcome yet to come at 1. The sums
here are correctly rounded and every further step is the one by which fitness itself is made, so that in floating point,
too, a bound is never below the fitness it bounds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from moevolve.evaluators.metrics import METRICS, mean
from moevolve.evaluators.types import FitnessKind, PreparedSplit

BOUNDED_KINDS: frozenset[FitnessKind] = frozenset({"generate", "rank", "agreement"})
"""Fitness kinds whose outcomes lie in [0, 1] by construction."""
LOOKS = 8
"""How often racing looks at one split at most: once per eighth of its examples. Each look has an eighth of alpha."""


def most_of(split: PreparedSplit) -> float:
    """The most that a split's score can be before anything is evaluated; infinite where no bound is known."""
    return 1.0 if split.fitness in BOUNDED_KINDS and METRICS[split.metric] is mean else math.inf


def weighted_mean(values: Sequence[float], weights: Sequence[float]) -> float:
    """The weighted mean by which scores of tasks make a fitness; rises with each of its values, rounding included."""
    return sum(weight * value for value, weight in zip(values, weights, strict=True)) / sum(weights)


@dataclass(frozen=True, slots=True)
class Tally:
    """What is known of a split's score after some of its examples.

    Attributes:
        most: the score if all examples to come score 1.
        seen_mean: mean outcome of those seen.
        seen: how many were.
        count: examples of the split.
        binary: whether those seen are all right or wrong, nothing between.
    """

    most: float
    seen_mean: float
    seen: int
    count: int
    binary: bool

    @classmethod
    def of(cls, outcomes: NDArray[np.floating]) -> Tally:
        """Count outcomes, NaN for those to come; one at least is there."""
        known = ~np.isnan(outcomes)
        hoped = np.where(known, outcomes, 1.0).astype(np.float64)
        seen = outcomes[known].astype(np.float64)
        return cls(mean(hoped), mean(seen), seen.size, int(outcomes.size), bool(np.isin(seen, (0.0, 1.0)).all()))

    def likely_most(self, alpha: float) -> float:
        """An upper confidence bound of the score at level `1 - alpha / LOOKS`, and never above `most`.

        It takes the examples seen for a random sample without replacement. Of right-or-wrong outcomes, the bound is the
        largest number of right ones among all with which so few of those seen, or fewer, are not too improbable
        (hypergeometric distribution); of others it is Hoeffding's inequality in R. J. Serfling's sharper form (Annals
        of Statistics 2(1), 1974, Cor. 1.1).
        """
        if self.binary:
            return self._likely_right(alpha / LOOKS) / self.count
        left = 1 - (self.seen - 1) / self.count
        return min(self.most, self.seen_mean + math.sqrt(left * math.log(LOOKS / alpha) / (2 * self.seen)))

    def _likely_right(self, level: float) -> int:
        """The largest number of right examples among all that isn't ruled out; found by bisection."""
        right = round(self.seen_mean * self.seen)
        low, high = right, self.count - self.seen + right
        while low < high:
            middle = (low + high + 1) // 2
            if _few_enough(right, self.seen, middle, self.count) >= level:
                low = middle
            else:
                high = middle - 1
        return low


def _few_enough(right: int, seen: int, total: int, count: int) -> float:
    """Probability that of `seen` examples drawn from `count`, `total` of them right, at most `right` are right."""
    least = max(0, seen - (count - total))
    return math.fsum(
        math.exp(_log_ways(total, j) + _log_ways(count - total, seen - j) - _log_ways(count, seen))
        for j in range(least, min(right, total) + 1)
    )


def _log_ways(count: int, chosen: int) -> float:
    return math.lgamma(count + 1) - math.lgamma(chosen + 1) - math.lgamma(count - chosen + 1)


@dataclass(frozen=True, slots=True)
class Floor:
    """What a candidate's fitness has to come to, and what is known of it.

    The fitness is the weighted mean of the scores on some splits, less a penalty.

    Attributes:
        least: a fitness below this changes nothing for anybody; the same is of use.
        splits: fingerprint of each split.
        weights: of each.
        most: the most that each score can be, as far as is known; a known score itself.
        examples: of each split.
        penalty: what is taken off.
        alpha: None for certainty. Otherwise racing: the probability, at most, with which a candidate of `least` or more
            is given up by one split's examples.
    """

    least: float
    splits: tuple[str, ...]
    weights: tuple[float, ...]
    most: tuple[float, ...]
    examples: tuple[int, ...]
    penalty: float = 0.0
    alpha: float | None = None

    def knowing(self, split: str, most: float) -> Floor:
        """The same with another bound on one split's score; splits that don't count change nothing."""
        values = (most if name == split else value for name, value in zip(self.splits, self.most, strict=True))
        return replace(self, most=tuple(values))

    @property
    def bound(self) -> float:
        """The most that the fitness can be."""
        return weighted_mean(self.most, self.weights) - self.penalty

    @property
    def out_of_reach(self) -> bool:
        """Whether the fitness can't be of use any more."""
        return self.bound < self.least

    def rejects(self, split: str, tally: Tally, certainly: bool = False) -> bool:
        """Whether a candidate may be given up with a split half-way, the splits before it known.

        Args:
            split: fingerprint.
            tally: of its examples so far.
            certainly: leave racing out.
        """
        if split not in self.splits:
            return False
        if self.knowing(split, tally.most).out_of_reach:
            return True
        return (
            self.alpha is not None and not certainly and self.knowing(split, tally.likely_most(self.alpha)).out_of_reach
        )
