"""Loops: what is one, and how surely more of them are found."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import binom

from moevolve.search.loop.significance import mcnemar
from moevolve.search.shrink.loops import compared, counted, is_loop


def test_a_loop_is_told_from_an_answer() -> None:
    assert is_loop([1, 2, 3] * 8) and is_loop([*range(12), *[7] * 36])
    assert is_loop([*range(400), *[7, 8] * 64]), "one that begins late"
    assert is_loop([*range(200)] * 2 + [*range(112)]), "whole paragraphs again"
    assert not is_loop(list(range(48))) and not is_loop([*range(30), *range(10)])
    assert not is_loop([5] * 8), "a short answer"


def test_two_models_are_compared_on_the_prompts_where_they_differ() -> None:
    pairs = [(True, True)] * 10 + [(False, True)] * 12 + [(True, False)] * 2 + [(False, False)] * 276
    found = compared(pairs, 512)
    assert (found.prompts, found.full, found.shrunk) == (300, 12, 22)
    assert found.p == pytest.approx(binom.sf(11, 14, 0.5)) and found.low < 10 / 300 < found.high
    assert found.fault == "repeats itself in 22 of 300 answers, the full model in 12 (p = 0.0065)"
    assert "the candidate's 7.3%, which is +3.3 points (+0.7 to +5.9, p = 0.0065)" in str(found)
    same = compared([(old, old) for old, _ in pairs], 512)
    assert same.p == 1 and same.fault is None


def test_one_model_is_compared_with_a_fixed_limit() -> None:
    found = counted([True] * 40 + [False] * 490, 512)
    assert (found.prompts, found.full, found.shrunk) == (530, None, 40)
    assert found.p == pytest.approx(binom.sf(39, 530, 0.05)) and found.low < 40 / 530 < found.high
    assert found.fault == "repeats itself in 40 of 530 answers, more than 5% (p = 0.0071)"
    assert str(found).startswith("The full model did not answer, since it doesn't fit on the device; limits are fixed.")
    refused = next(loops for loops in range(531) if counted([True] * loops + [False] * (530 - loops), 512).fault)
    chances = [binom.sf(refused - 1, 530, share) for share in (0.036, 0.05, 0.072, 0.1)]
    assert chances == pytest.approx([0, 0.04, 0.67, 0.995], abs=0.005)


def power(prompts: int, full: float, shrunk: float) -> float:
    """Probability that independent loops with these shares are found to be more."""
    lost, gained = shrunk * (1 - full), full * (1 - shrunk)
    numbers = np.arange(prompts + 1)
    found = 0.0
    for differing, chance in enumerate(binom.pmf(numbers, prompts, lost + gained)):
        if chance < 1e-6:
            continue
        refused = (more for more in range(differing + 1) if mcnemar(more, differing - more, "greater") <= 0.05)
        least = next(refused, None)
        if least is not None:
            found += float(chance * binom.sf(least - 1, differing, lost / (lost + gained)))
    return found


def test_a_doubling_is_found_with_a_probability_of_four_fifths_and_false_alarms_are_rare() -> None:
    assert power(530, 0.036, 0.072) == pytest.approx(0.80, abs=0.005)
    assert power(530, 0.036, 0.036) == pytest.approx(0.04, abs=0.005)


def test_what_the_prompts_cannot_show_is_said() -> None:
    few = compared([(False, False)] * 27, 512)
    assert str(few).endswith("So few prompts can't show smaller increases; a longer --guard-time asks more")
    many = compared([(False, False)] * 520 + [(True, True)] * 10, 512)
    assert str(many).endswith(")"), "530 prompts show what matters"
    lost = compared([(True, True)] * 24 + [(False, False)] * 3, 512)
    assert "Most of the full model's own answers are loops, so that more can't show" in str(lost)
