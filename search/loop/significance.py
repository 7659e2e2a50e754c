"""Paired significance tests and confidence intervals of scores over examples and seeds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from moevolve.evaluators.metrics import METRICS, confidence_interval, scale_of
from moevolve.evaluators.scales import common_scale

_RESAMPLES = 10_000
_TINY = 1e-12
# Smallest p-value for which the quantiles of Student's t are computed exactly.
_LEAST_P = 1e-100


@dataclass(frozen=True, slots=True)
class TaskOutcomes:
    """Per-example outcomes of one model on one task split.

    Attributes:
        values: Float64 outcomes in [0, 1], shape (seeds, examples).
        metric: Name of the metric that turns a seed's outcomes into its score.
        weight: Weight of the task in the score over all tasks.
        seeds: The seed of every row.
        fingerprint: Fingerprint of the split, which tells whether two models were scored on the same examples.
    """

    values: NDArray[np.float64] = field(repr=False)
    metric: str
    weight: float
    seeds: tuple[int, ...] = (0,)
    fingerprint: str = ""


@dataclass(frozen=True, slots=True)
class Significance:
    """A paired test's result.

    Attributes:
        p: Two-sided p-value, not corrected for the number of tests.
        test: `McNemar` (exact), `sign flips` (a permutation test on the mean of paired differences), or
            `seeds x examples` (see `paired_test`).
        seeds: Number of seeds compared. With 1, the test says nothing about other seeds.
        against: Method that the row is tested against.
    """

    p: float
    test: str
    seeds: int
    against: str = ""


def paired_test(one: Sequence[TaskOutcomes], other: Sequence[TaskOutcomes]) -> Significance | None:
    """Two-sided paired test for equal scores on the same examples and, if there are several, the same seeds.

    With several seeds, seeds and examples are both random samples. The variance of the mean difference is the variance
    over seeds plus the variance over examples, estimated from the mean squares of the two-way table of differences
    (seeds x examples, no replicates; negative components are set to 0), as for several readers of the same cases
    (Dorfman, Berbaum and Metz, Investigative Radiology 27, 1992). The mean divided by its standard error is compared
    with Student's t at both degrees of freedom, weighted by the two variances (Cochran and Cox, Experimental Designs,
    1957, Sec. 4.14), which is conservative with few seeds. Averaging over seeds first would ignore their variance.

    With one seed, or the same outcomes for every seed on both sides, right-or-wrong outcomes on one task are compared
    by McNemar's test (Psychometrika 12, 1947) in its exact, binomial form. Other outcomes are compared by 10,000 random
    sign flips of the per-example differences, weighted by task; under a geometric mean, of the logarithms' differences.

    Perplexities are compared by their logarithms.

    Args:
        one, other: Outcomes of the two models, per task; only seeds that both sides have count.

    Returns:
        The test, or None if no seed is on both sides, or the two weren't scored on the same examples.
    """
    examples = [[(each.fingerprint, each.values.shape[1]) for each in side] for side in (one, other)]
    both = [seed for seed in one[0].seeds if seed in other[0].seeds] if one and other else []
    if not both or examples[0] != examples[1]:
        return None
    seeds = len(both)
    left, right = (
        [(each.values[[each.seeds.index(seed) for seed in both]], each) for each in side] for side in (one, other)
    )
    if all((rows == rows[0]).all() for rows, _ in (*left, *right)):
        return _over_examples([(a[0], b[0], of) for (a, of), (b, _) in zip(left, right, strict=True)], seeds)
    logs = common_scale(scale_of(of.metric) for _, of in left) == "perplexity"
    tables = [
        (_additive(a, of.metric, logs) - _additive(b, of.metric, logs), of.weight)
        for (a, of), (b, _) in zip(left, right, strict=True)
    ]
    return Significance(_two_way(tables).p, "seeds x examples", seeds)


def mcnemar(more: int, fewer: int, alternative: Literal["two-sided", "greater"] = "two-sided") -> float:
    """p-value of McNemar's test in its exact, binomial form, from the numbers of pairs that differ either way."""
    from scipy.stats import binomtest

    return 1.0 if more + fewer == 0 else float(binomtest(more, more + fewer, alternative=alternative).pvalue)


def score_interval(outcomes: Sequence[TaskOutcomes]) -> tuple[float, float]:
    """95 % confidence interval of a score, which is the mean over tasks and seeds (`mean_on_scale`).

    With several seeds, seeds and examples are both random samples, as in `paired_test`. With one seed, or the same
    outcomes for every seed, it is `confidence_interval` for one task, and for several a bootstrap over each task's
    examples.
    """
    tables = [(each.values, each) for each in outcomes]
    logs = common_scale(scale_of(each.metric) for each in outcomes) == "perplexity"
    if any((rows != rows[0]).any() for rows, _ in tables):
        found = _two_way([(_additive(rows, of.metric, logs), of.weight) for rows, of in tables])
        low, high = found.mean - found.limit(0.05), found.mean + found.limit(0.05)
        return (math.exp(low), min(1.0, math.exp(high))) if logs else (max(0.0, low), min(1.0, high))
    if len(tables) == 1:
        return confidence_interval(tables[0][0][0], metric=tables[0][1].metric)
    rng = np.random.default_rng(0)
    total = sum(of.weight for _, of in tables)
    means = np.zeros(1000)
    for rows, of in tables:
        values = _logs(rows[0]) if METRICS[of.metric].is_geometric else rows[0]
        drawn = np.array([values[rng.integers(values.size, size=values.size)].mean() for _ in range(len(means))])
        means += of.weight / total * (np.exp(drawn) if METRICS[of.metric].is_geometric and not logs else drawn)
    low, high = np.quantile(np.exp(means) if logs else means, [0.025, 0.975])
    return float(low), float(high)


def holm(values: Sequence[float | None]) -> list[float | None]:
    """Correct the p-values of a family of tests for their number (S. Holm, Scand. J. Statist. 6, 1979).

    The smallest of m p-values is multiplied by m, the next by m - 1 and so on; the results don't decrease and are at
    most 1. Rejecting those up to 0.05 keeps the probability of rejecting any true hypothesis at 0.05 or less.

    Returns:
        Corrected p-values in the order of `values`; None for each that is None, which is no test.
    """
    corrected: list[float | None] = [None] * len(values)
    tests, least = sorted((p, place) for place, p in enumerate(values) if p is not None), 0.0
    for rank, (p, place) in enumerate(tests):
        corrected[place] = least = max(least, min(1.0, (len(tests) - rank) * p))
    return corrected


def _over_examples(
    pairs: Sequence[tuple[NDArray[np.float64], NDArray[np.float64], TaskOutcomes]], seeds: int
) -> Significance:
    """Return the test over examples alone; `pairs` has both sides' outcomes, shape (examples,), per task."""
    if len(pairs) == 1 and all(np.isin(side, (0.0, 1.0)).all() for side in pairs[0][:2]):
        difference = pairs[0][0] - pairs[0][1]
        return Significance(mcnemar(int((difference > 0).sum()), int((difference < 0).sum())), "McNemar", seeds)
    total = sum(of.weight for _, _, of in pairs)
    parts = []
    for a, b, of in pairs:
        difference = _logs(a) - _logs(b) if METRICS[of.metric].is_geometric else a - b
        parts.append(difference * (of.weight / total / a.size))
    differences = np.concatenate(parts)
    observed = abs(differences.sum())
    rng = np.random.default_rng(0)
    extreme, block = 0, max(1, 1_000_000 // differences.size)  # limits the matrix of signs to 8 MB
    for start in range(0, _RESAMPLES, block):
        signs = rng.choice((-1.0, 1.0), size=(min(block, _RESAMPLES - start), differences.size))
        extreme += int((np.abs(signs @ differences) >= observed - _TINY).sum())
    return Significance((extreme + 1) / (_RESAMPLES + 1), "sign flips", seeds)


@dataclass(frozen=True, slots=True)
class _TwoWay:
    """Mean of a table (seeds, examples) whose rows and columns are both random samples.

    Attributes:
        by_seeds, by_examples: The two components of the mean's variance.
        seeds, examples: Number of rows and columns.
    """

    mean: float
    by_seeds: float
    by_examples: float
    seeds: int
    examples: int

    def limit(self, level: float) -> float:
        """Half width of the confidence interval of the mean at confidence 1 - `level`."""
        from scipy.stats import t as student

        variance = self.by_seeds + self.by_examples
        if not variance:
            return 0.0
        rows, columns = (float(student.isf(level / 2, count - 1)) for count in (self.seeds, self.examples))
        return (self.by_seeds * rows + self.by_examples * columns) / math.sqrt(variance)

    @property
    def p(self) -> float:
        """Two-sided p-value of the hypothesis that the true mean is 0."""
        from scipy.optimize import brentq

        distance = abs(self.mean)
        if distance < _TINY:
            return 1.0
        if self.limit(_LEAST_P) <= distance:
            return _LEAST_P
        return float(10 ** brentq(lambda power: self.limit(10**power) - distance, math.log10(_LEAST_P), 0))


def _two_way(tables: Sequence[tuple[NDArray[np.float64], float]]) -> _TwoWay:
    """Weighted mean of tables, shape (seeds, examples), with the same seeds and different examples."""
    total = sum(weight for _, weight in tables)
    seeds = tables[0][0].shape[0]
    per_seed = np.zeros(seeds)
    by_examples = interaction = 0.0
    for values, weight in tables:
        share, count = weight / total, values.shape[1]
        rows, columns = values.mean(axis=1), values.mean(axis=0)
        per_seed += share * rows
        if count > 1:
            rest = values - rows[:, None] - columns + values.mean()
            by_examples += share**2 * float(columns.var(ddof=1)) / count
            interaction += share**2 * float((rest**2).sum()) / ((seeds - 1) * (count - 1) * seeds * count)
    # The mean squares of seeds and of examples both contain the interaction's variance, which must count only once.
    by_seeds = max(float(per_seed.var(ddof=1)) / seeds, interaction)
    least = max(2, min(values.shape[1] for values, _ in tables))
    return _TwoWay(float(per_seed.mean()), by_seeds, max(by_examples - interaction, 0.0), seeds, least)


def _additive(values: NDArray[np.float64], metric: str, as_logs: bool) -> NDArray[np.float64]:
    """Values, shape (seeds, examples), whose row means are the seeds' scores, or their logarithms.

    Those of a geometric mean are linear in the logarithms: scores to first order.
    """
    if not METRICS[metric].is_geometric:
        return values
    logs = _logs(values)
    if as_logs:
        return logs
    means = logs.mean(axis=1, keepdims=True)
    return np.exp(means) * (1 + logs - means)


def _logs(values: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.log(np.maximum(values, np.finfo(np.float32).tiny))
