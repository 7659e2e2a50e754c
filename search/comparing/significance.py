"""Whether two models' scores differ by more than the choice of examples explains."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from scipy.stats import binomtest

from moevolve.evaluators.metrics import confidence_interval

_RESAMPLES = 10_000
_TINY = 1e-12


@dataclass(frozen=True, slots=True)
class Outcomes:
    """What one model scored on the examples of one task split.

    Attributes:
        values: float64 [examples], each in [0, 1]; a mean over seeds where there are several.
        metric: how they make a score, `mean` or `geometric_mean`.
        weight: of the task in the score over all tasks.
    """

    values: NDArray[np.float64] = field(repr=False)
    metric: str
    weight: float


@dataclass(frozen=True, slots=True)
class Significance:
    """A paired test's result.

    Attributes:
        p: two-sided p-value.
        test: `McNemar` (exact), or `sign flips` (a permutation test on the mean of paired differences).
    """

    p: float
    test: str


def paired_test(one: Sequence[Outcomes], other: Sequence[Outcomes], seed: int = 0) -> Significance:
    """Two-sided paired test of equal scores on the same examples.

    Right-or-wrong outcomes on one task: McNemar's test (Psychometrika 12, 1947) in its exact, binomial form. Otherwise
    the signs of the per-example differences are flipped at random, 10,000 times; differences of logarithms under a
    geometric mean, and each task's with its weight.

    Raises:
        ValueError: the examples don't pair.
    """
    if [each.values.size for each in one] != [each.values.size for each in other]:
        raise ValueError("the two models were not scored on the same examples")
    if len(one) == 1 and all(np.isin(each[0].values, (0.0, 1.0)).all() for each in (one, other)):
        difference = one[0].values - other[0].values
        won, lost = int((difference > 0).sum()), int((difference < 0).sum())
        return Significance(1.0 if won + lost == 0 else float(binomtest(won, won + lost).pvalue), "McNemar")
    total = sum(each.weight for each in one)
    differences = np.concatenate(
        [(_additive(a) - _additive(b)) * (a.weight / total / a.values.size) for a, b in zip(one, other, strict=True)]
    )
    observed = abs(differences.sum())
    rng = np.random.default_rng(seed)
    extreme, block = 0, max(1, 1_000_000 // differences.size)  # bounds the matrix of signs to some 8 MB
    for start in range(0, _RESAMPLES, block):
        signs = rng.choice((-1.0, 1.0), size=(min(block, _RESAMPLES - start), differences.size))
        extreme += int((np.abs(signs @ differences) >= observed - _TINY).sum())
    return Significance((extreme + 1) / (_RESAMPLES + 1), "sign flips")


def weighted_interval(outcomes: Sequence[Outcomes], seed: int = 0) -> tuple[float, float]:
    """95 % interval of the weighted mean of tasks' scores: bootstrap over each task's examples."""
    if len(outcomes) == 1:
        return confidence_interval(outcomes[0].values, metric=outcomes[0].metric)
    rng = np.random.default_rng(seed)
    total = sum(each.weight for each in outcomes)
    means = np.zeros(1000)
    for each in outcomes:
        values = _additive(each)
        drawn = np.array([values[rng.integers(values.size, size=values.size)].mean() for _ in range(len(means))])
        means += each.weight / total * (np.exp(drawn) if each.metric == "geometric_mean" else drawn)
    low, high = np.quantile(means, [0.025, 0.975])
    return float(low), float(high)


def _additive(outcomes: Outcomes) -> NDArray[np.float64]:
    """Values whose plain mean decides the score."""
    if outcomes.metric != "geometric_mean":
        return outcomes.values
    return np.log(np.maximum(outcomes.values, np.finfo(np.float32).tiny))
