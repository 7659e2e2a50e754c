"""Compute a score and its confidence interval from per-example outcomes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import ArrayLike, NDArray

from moevolve.evaluators.scales import ScaleName

_LEVEL = 0.95
# On 300 outcomes the ends of the interval then vary by 6 % of the standard error, and it takes 30 ms.
_RESAMPLES = 2000


def mean(outcomes: NDArray[np.float64]) -> float:
    """Return the arithmetic mean, correctly rounded, so that it doesn't depend on the order of summation."""
    return math.fsum(outcomes.tolist()) / outcomes.size


def geometric_mean(outcomes: NDArray[np.float64]) -> float:
    """Return exp(mean(log outcomes)), or 0 if any outcome is 0."""
    return math.exp(mean(np.log(outcomes))) if (outcomes > 0).all() else 0.0


@dataclass(frozen=True, slots=True)
class Metric:
    """How outcomes become a score, and how that is shown.

    Attributes:
        average: Function of the outcomes, float64 [examples].
        scale: Scale that its scores are shown on.
    """

    average: Callable[[NDArray[np.float64]], float]
    scale: ScaleName = "percent"

    @property
    def is_geometric(self) -> bool:
        """Whether intervals and tests are computed with the logarithms of the outcomes."""
        return self.average is geometric_mean


# Metrics by name. `accuracy`, `agreement` and `mean` are the same function, for answers that are matched, overlaps with
# the full model and outcomes of lm-eval; `inverse_perplexity` is the geometric mean of likelihoods per token.
METRICS = {
    "accuracy": Metric(mean),
    "agreement": Metric(mean, scale="agreement"),
    "geometric_mean": Metric(geometric_mean),
    "inverse_perplexity": Metric(geometric_mean, scale="perplexity"),
    "mean": Metric(mean),
}


def scale_of(metric: str) -> ScaleName:
    """Return the scale of a metric's scores by its name; `percent` for one that another version has stored."""
    return METRICS[metric].scale if metric in METRICS else "percent"


def score(metric: str, outcomes: ArrayLike) -> float:
    """Apply a metric, by its name in `METRICS`, to the outcomes of all examples, in [0, 1].

    Raises:
        ValueError: There are no outcomes, or not all are finite.
    """
    return METRICS[metric].average(_checked(outcomes))


def confidence_interval(outcomes: ArrayLike, *, metric: str = "mean") -> tuple[float, float]:
    """Return a score's two-sided 95 % confidence interval `(low, high)`, of outcomes [examples] in [0, 1].

    For the mean of right-or-wrong outcomes it is the Wilson score interval, which stays inside [0, 1] and has the right
    coverage near its ends and for few examples. Otherwise it is a percentile bootstrap over examples. Equal arguments
    give equal numbers.

    Raises:
        ValueError: There are no outcomes, or not all are finite.
    """
    values = _checked(outcomes)
    geometric = METRICS[metric].is_geometric
    if not geometric and np.isin(values, (0.0, 1.0)).all():
        return wilson(int(values.sum()), values.size)
    with np.errstate(divide="ignore"):  # the logarithm of 0 is -inf, and its exponential 0 again
        means = _bootstrap_means(np.log(values) if geometric else values)
    means = np.exp(means) if geometric else means
    low, high = np.quantile(means, [(1 - _LEVEL) / 2, (1 + _LEVEL) / 2])
    return float(low), float(high)


def weighted_mean(values: Sequence[float], weights: Sequence[float]) -> float:
    """Return the weighted arithmetic mean."""
    return sum(weight * value for value, weight in zip(values, weights, strict=True)) / sum(weights)


def mean_on_scale(scores: Sequence[float], weights: Sequence[float], scale: ScaleName) -> float:
    """Return the weighted mean of scores of several tasks or seeds that are shown on a scale.

    It is the arithmetic mean, but for perplexities the geometric one, so that their logarithms are averaged: in an
    arithmetic mean of reciprocals the text with the lowest perplexity would count most.
    """
    if scale != "perplexity":
        return weighted_mean(scores, weights)
    return math.exp(weighted_mean([math.log(score) for score in scores], weights)) if min(scores) > 0 else 0.0


def wilson(successes: int, n: int) -> tuple[float, float]:
    """Return the 95 % Wilson score interval of `successes` in `n` trials, at least 1 (E. B. Wilson, JASA 22, 1927)."""
    z = NormalDist().inv_cdf((1 + _LEVEL) / 2)
    p = successes / n
    centre = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    # At 0 and n successes one end is exactly 0 or 1, which rounding errors must not change.
    low = 0.0 if successes == 0 else max(0.0, centre - half)
    high = 1.0 if successes == n else min(1.0, centre + half)
    return low, high


def _bootstrap_means(values: NDArray[np.float64]) -> NDArray[np.float64]:
    rng = np.random.default_rng(0)
    means = np.empty(_RESAMPLES)
    block = max(1, 1_000_000 // values.size)  # limits the index matrix to about 8 MB
    for start in range(0, _RESAMPLES, block):
        stop = min(_RESAMPLES, start + block)
        means[start:stop] = values[rng.integers(values.size, size=(stop - start, values.size))].mean(axis=1)
    return means


def _checked(outcomes: ArrayLike) -> NDArray[np.float64]:
    values = np.asarray(outcomes, dtype=np.float64).ravel()
    if values.size == 0:
        raise ValueError("no outcomes to score")
    if not np.isfinite(values).all():
        raise ValueError("outcomes must be finite")
    return values
