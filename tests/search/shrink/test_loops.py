"""Loops: what is one, and how surely more of them are found, against computations of another kind."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.signal import fftconvolve
from scipy.stats import binom, binomtest

from moevolve.search.shrink.loops import (
    compared,
    difference,
    is_clear,
    is_loop,
    looks_at,
    p_value,
    power,
)
from moevolve.search.shrink.options import GUARD_PROMPTS


def test_a_loop_is_told_from_an_answer() -> None:
    assert is_loop([1, 2, 3] * 8) and is_loop([*range(12), *[7] * 36])
    assert is_loop([*range(400), *[7, 8] * 64]), "one that begins late"
    assert is_loop([*range(200)] * 2 + [*range(112)]), "whole paragraphs again"
    assert not is_loop(list(range(48))) and not is_loop([*range(30), *range(10)])
    assert not is_loop([5] * 8), "a short answer"


def test_p_values_are_those_of_the_binomial_test() -> None:
    for lost, gained in ((5, 0), (8, 1), (12, 5), (3, 7), (40, 21)):
        expected = binomtest(lost, lost + gained, 0.5, alternative="greater").pvalue
        assert p_value(lost, gained) == pytest.approx(expected)
    assert p_value(0, 0) == 1


def test_two_models_are_compared_on_the_prompts_where_they_differ() -> None:
    pairs = [(True, True)] * 10 + [(False, True)] * 12 + [(True, False)] * 2 + [(False, False)] * 276
    found = compared(pairs, 512, [150, 300])
    assert (found.prompts, found.full, found.shrunk) == (300, 12, 22) and found.p == p_value(12, 2)
    assert found.low < 10 / 300 < found.high and (found.low, found.high) == difference(12, 2, 300)
    said = "repeats itself in 22 of 300 answers, the full model in 12 (p = 0.0065)"
    assert found.judged(0.0).fault == found.judged(0.03).fault == said
    assert found.judged(0.04).fault is None and found.judged(0.0).judged(1.0).fault is None
    same = compared([(old, old) for old, _ in pairs], 512, [300])
    assert same.p == 1 and same.judged(0.0).fault is None
    assert "the candidate's 7.3%, which is +3.3 points (+0.7 to +5.9, p = 0.0065)" in str(found)


def test_answers_end_where_more_of_them_change_nothing() -> None:
    assert looks_at(560, 46) == [70, 140, 280, 560] and looks_at(40, 40) == [40]
    assert is_clear(0, 0, 140) and not is_clear(0, 0, 70), "a doubling may still be hidden"
    assert is_clear(10, 0, 20) and not is_clear(5, 0, 400), "more loops, but not so surely that it may end early"


def found_by_convolution(looks: list[int], full: float, shrunk: float) -> float:
    """Probability that independent loops are found to be more, from the exact distribution at every look."""
    size = 110  # of both numbers of discordant pairs; more are as good as impossible
    lost, gained = shrunk * (1 - full), full * (1 - shrunk)
    numbers = np.arange(size)
    refused = binom.sf(numbers[:, None] - 1, numbers[:, None] + numbers, 0.5) <= 0.05
    going = np.zeros((size, size))
    going[0, 0], before, found = 1.0, 0, 0.0
    for look in looks:
        count = look - before
        added = binom.pmf(numbers, count, lost)[:, None] * np.stack(
            [binom.pmf(numbers, max(count - one, 0), gained / (1 - lost)) for one in numbers]
        )
        going, before = fftconvolve(going, added)[:size, :size], look
        clear = np.array(
            [[is_clear(one, other, max(look, one + other)) for other in range(size)] for one in range(size)]
        )
        ends = clear | (look == looks[-1])
        found += float(going[ends & refused].sum())
        going[ends] = 0
    return found


def test_a_doubling_is_found_with_a_probability_of_four_fifths_and_false_alarms_are_rare() -> None:
    looks = looks_at(GUARD_PROMPTS, 46)
    exact = found_by_convolution(looks, 0.036, 0.072)
    assert exact >= 0.8 > found_by_convolution(looks_at(GUARD_PROMPTS - 16, 46), 0.036, 0.072)
    assert power(looks) == pytest.approx(exact, abs=0.012)  # three standard errors of 10,000 draws
    assert power(looks, both=0.02) > 0.85, "models that loop on the same prompts"
    for share in (0.0, 0.01, 0.036, 0.2):
        assert power(looks, share, share) <= 0.05
    assert found_by_convolution(looks, 0.036, 0.036) == pytest.approx(power(looks, 0.036, 0.036), abs=0.006)
