"""Scores and their intervals against known values."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moevolve.evaluators.metrics import confidence_interval, score, wilson


def test_wilson_known_values() -> None:
    """Newcombe, Statistics in Medicine 17 (1998), table I: 81/263, 15/148, 0/20, 1/29."""
    assert wilson(81, 263) == pytest.approx((0.2553, 0.3662), abs=5e-5)
    assert wilson(15, 148) == pytest.approx((0.0624, 0.1605), abs=5e-5)
    assert wilson(0, 20) == pytest.approx((0.0, 0.1611), abs=5e-5)
    assert wilson(1, 29) == pytest.approx((0.0061, 0.1718), abs=5e-5)


@settings(max_examples=30)
@given(st.integers(1, 200).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_wilson_contains_the_proportion_and_is_symmetric(counts: tuple[int, int]) -> None:
    successes, n = counts
    low, high = confidence_interval(np.arange(n) < successes)
    assert 0.0 <= low <= successes / n <= high <= 1.0
    assert wilson(n - successes, n) == pytest.approx((1 - high, 1 - low))


def test_bootstrap_agrees_with_the_normal_interval_and_repeats_itself() -> None:
    outcomes = np.random.default_rng(5).beta(2, 3, size=2000)
    low, high = confidence_interval(outcomes)
    half = 1.96 * outcomes.std() / np.sqrt(outcomes.size)
    assert (low, high) == pytest.approx((outcomes.mean() - half, outcomes.mean() + half), abs=half * 0.1)
    assert (low, high) == confidence_interval(outcomes)


def test_means_are_correctly_rounded_and_the_geometric_one_is_the_reciprocal_of_perplexity() -> None:
    assert score("accuracy", np.array([0.1] * 10)) == 0.1
    assert score("mean", np.array([1.0, 0.5, 0.0])) == 0.5
    logprobs = np.array([-0.5, -2.0, -3.5])
    assert score("geometric_mean", np.exp(logprobs)) == pytest.approx(np.exp(-2.0))
    assert score("geometric_mean", np.ones(3)) == 1.0
    assert score("geometric_mean", [0.5, 0.0]) == 0.0


def test_an_interval_is_about_the_metric_of_the_score() -> None:
    logs = np.random.default_rng(6).normal(-3, 1.5, size=1500).clip(max=0)
    outcomes = np.exp(logs).astype(np.float32)
    value = score("geometric_mean", np.exp(logs))
    low, high = confidence_interval(outcomes, metric="geometric_mean")
    half = 1.96 * logs.std() / np.sqrt(logs.size)
    assert (low, high) == pytest.approx((value * np.exp(-half), value * np.exp(half)), rel=half * 0.1)
    assert confidence_interval(outcomes)[0] > high, "the mean is another number"
    assert confidence_interval([1.0] * 9, metric="geometric_mean") == (1.0, 1.0)
    assert confidence_interval([1.0] * 9)[0] < 1.0
    low, high = confidence_interval([0.0, 0.5, 0.5, 0.5], metric="geometric_mean")
    assert (low, high) == (0.0, 0.5)


def test_bad_input() -> None:
    with pytest.raises(ValueError, match="finite"):
        score("mean", [np.nan])
    with pytest.raises(ValueError, match="no outcomes"):
        confidence_interval([])
