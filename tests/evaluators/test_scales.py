"""Scores as people read them: perplexities and their intervals against the definition, and shares in %."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moevolve.evaluators.metrics import METRICS, confidence_interval, score
from moevolve.evaluators.scales import SCALES, common_scale, scales_title

PERPLEXITY, PERCENT = SCALES["perplexity"], SCALES["percent"]


def test_a_perplexity_and_its_interval_are_those_of_the_mean_log_likelihood() -> None:
    rng = np.random.default_rng(0)
    nats = rng.normal(2.9, 0.6, 300).clip(0)  # negative log-likelihood per token of every window
    outcomes = np.exp(-nats)
    found = score("inverse_perplexity", outcomes)
    low, high = confidence_interval(outcomes, metric="inverse_perplexity")
    # The same percentiles of means of the logarithms, by another program.
    drawn = np.array([rng.choice(nats, nats.size).mean() for _ in range(4000)])
    expected = np.exp(np.quantile(drawn, [0.025, 0.975]))
    assert PERPLEXITY.value(found) == pytest.approx(np.exp(nats.mean()))
    shown = [float(text) for text in PERPLEXITY.interval(low, high).split(" - ")]
    assert shown == sorted(shown) and shown == pytest.approx(expected, rel=0.01)
    assert shown[0] < PERPLEXITY.value(found) < shown[1]
    # A perplexity's standard deviation: that of exp(m) for a small one of m.
    some = 1 / np.exp(rng.normal(2.9, 0.01, 10_000))
    assert float(PERPLEXITY.spread(some.mean(), some.std())) == pytest.approx((1 / some).std(), rel=0.01)


@given(st.floats(1e-6, 1), st.floats(1e-6, 1))
def test_a_change_is_the_ratio_of_the_second_perplexity_to_the_first(first: float, second: float) -> None:
    difference = PERPLEXITY.additive(second) - PERPLEXITY.additive(first)
    ratio = PERPLEXITY.value(second) / PERPLEXITY.value(first)
    assert float(PERPLEXITY.change(difference).removesuffix("x")) == pytest.approx(ratio, abs=0.006)


def test_texts() -> None:
    assert [PERCENT.text(0.0529), PERCENT.phrase(0.0529), PERCENT.phrase(None)] == ["5.3", "5.3 %", "-"]
    assert [PERPLEXITY.text(0.0529), PERPLEXITY.phrase(0.0529), PERPLEXITY.text(None)] == ["18.90 ppl"] * 2 + ["-"]
    assert [PERPLEXITY.text(each) for each in (1, 1e-5, 0, -1)] == [
        *("1.000 ppl", "100,000 ppl"),
        *["infinite ppl"] * 2,
    ]
    assert PERCENT.interval(0.5, 0.75) == "50.0 - 75.0" and PERPLEXITY.interval(0.1, 0.125) == "8.000 - 10.00"
    assert PERCENT.change(-0.012) == "-1.2" and PERCENT.changes(-0.01, 0.02) == "-1.0 to +2.0"
    assert PERPLEXITY.changes(-math.log(2), math.log(4)) == "0.25x to 2.00x"


def test_the_scale_of_a_mean_is_the_one_that_its_scores_share() -> None:
    assert common_scale(["perplexity", "perplexity"]) == "perplexity"
    assert common_scale(["perplexity", "percent"]) == common_scale([]) == "percent"
    assert scales_title(["perplexity"]) == PERPLEXITY.title and scales_title([]) == PERCENT.title
    assert scales_title(["perplexity", "percent"]) == f"{PERCENT.title}; {PERPLEXITY.title}"
    assert [name for name, metric in METRICS.items() if metric.scale == "perplexity"] == ["inverse_perplexity"]
