"""From per-example outcomes to a score and its confidence interval."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import NormalDist

import numpy as np
from numpy.typing import ArrayLike, NDArray

from moevolve.evaluators.errors import UserError

Metric = Callable[[NDArray[np.float64]], float]


def mean(outcomes: NDArray[np.float64]) -> float:
    """The plain mean; correctly rounded, so it doesn't depend on the order of summation."""
    return math.fsum(outcomes.tolist()) / outcomes.size


def geometric_mean(outcomes: NDArray[np.float64]) -> float:
    """exp(mean(log outcomes)); 0 if any outcome is 0. Of likelihoods per token, it is 1 / perplexity."""
    return math.exp(mean(np.log(outcomes))) if (outcomes > 0).all() else 0.0


METRICS: dict[str, Metric] = {"accuracy": mean, "geometric_mean": geometric_mean, "mean": mean}
"""`accuracy` and `mean` are one function; the name says whether outcomes are right-or-wrong or graded (F1)."""


def known_metric(name: str) -> str:
    """Returns `name`.

    Raises:
        ValueError: no such metric; the message lists those there are.
    """
    if name not in METRICS:
        raise ValueError(f"unknown metric `{name}`; known: {', '.join(sorted(METRICS))}")
    return name


def score(metric: str, outcomes: ArrayLike) -> float:
    """The metric over all examples, in [0, 1].

    Args:
        metric: a name in `METRICS`.
        outcomes: [examples], each in [0, 1].

    Raises:
        UserError: unknown metric.
        ValueError: no outcomes.
    """
    values = _checked(outcomes)
    if metric not in METRICS:
        raise UserError(f"unknown metric `{metric}`; known: {', '.join(sorted(METRICS))}")
    return METRICS[metric](values)


def confidence_interval(
    outcomes: ArrayLike | Sequence[float],
    level: float = 0.95,
    *,
    metric: str = "mean",
    resamples: int = 2000,
    seed: int = 0,
) -> tuple[float, float]:
    """A two-sided confidence interval for a score.

    The mean of right-or-wrong outcomes gets the Wilson score interval, which stays inside [0, 1] and is honest near its
    ends and for few examples; everything else gets a seeded percentile bootstrap over examples.

    Args:
        outcomes: [examples], each in [0, 1].
        level: coverage, in (0, 1).
        metric: what made the score of the outcomes.
        resamples: bootstrap resamples.
        seed: of the bootstrap.

    Returns:
        `(low, high)`; the same arguments give the same numbers.

    Raises:
        ValueError: no outcomes, a level outside (0, 1), or an unknown metric.
    """
    values = _checked(outcomes)
    if not 0 < level < 1:
        raise ValueError(f"confidence level must lie in (0, 1), got {level}")
    geometric = METRICS[known_metric(metric)] is geometric_mean
    if not geometric and np.isin(values, (0.0, 1.0)).all():
        return wilson(int(values.sum()), values.size, level)
    rng = np.random.default_rng(seed)
    if geometric:
        with np.errstate(divide="ignore"):  # the logarithm of 0 is -inf, and its exponential 0 again
            means = np.exp(_bootstrap_means(np.log(values), resamples, rng))
    else:
        means = _bootstrap_means(values, resamples, rng)
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def weighted_mean(values: Sequence[float], weights: Sequence[float]) -> float:
    """The weighted mean by which scores of tasks make a fitness."""
    return sum(weight * value for value, weight in zip(values, weights, strict=True)) / sum(weights)


def wilson(successes: int, n: int, level: float = 0.95) -> tuple[float, float]:
    """The Wilson score interval of a proportion (E. B. Wilson, JASA 22, 1927).

    Args:
        successes: how many of the trials succeeded.
        n: trials, at least 1.
        level: coverage, in (0, 1).
    """
    z = NormalDist().inv_cdf((1 + level) / 2)
    p = successes / n
    centre = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    # At 0 and n successes one end is exactly 0 or 1; rounding must not push it off.
    low = 0.0 if successes == 0 else max(0.0, centre - half)
    high = 1.0 if successes == n else min(1.0, centre + half)
    return low, high


def _bootstrap_means(values: NDArray[np.float64], resamples: int, rng: np.random.Generator) -> NDArray[np.float64]:
    means = np.empty(resamples)
    block = max(1, 1_000_000 // values.size)  # bounds the index matrix to some 8 MB
    for start in range(0, resamples, block):
        stop = min(resamples, start + block)
        means[start:stop] = values[rng.integers(values.size, size=(stop - start, values.size))].mean(axis=1)
    return means


def _checked(outcomes: ArrayLike | Sequence[float]) -> NDArray[np.float64]:
    values = np.asarray(outcomes, dtype=np.float64).ravel()
    if values.size == 0:
        raise ValueError("no outcomes to score")
    if not np.isfinite(values).all():
        raise ValueError("outcomes must be finite")
    return values
