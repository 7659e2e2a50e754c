"""Tests and intervals against closed forms, exact enumerations, and simulations in plain numpy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.stats import binom, norm, ttest_1samp
from scipy.stats import t as student

from moevolve.evaluators.metrics import confidence_interval
from moevolve.search.loop.significance import TaskOutcomes, holm, paired_test, score_interval


def outcomes(values: Any, metric: str = "mean", weight: float = 1.0) -> TaskOutcomes:
    """A row per seed; one seed may be given without."""
    rows = np.atleast_2d(np.asarray(values, dtype=np.float64))
    return TaskOutcomes(rows, metric, weight, tuple(range(len(rows))))


def test_right_or_wrong_answers_are_compared_by_mcnemar() -> None:
    one = [1] * 9 + [0] * 2 + [1] * 5 + [0] * 4
    other = [0] * 9 + [1] * 2 + [1] * 5 + [0] * 4
    found = paired_test([outcomes(one)], [outcomes(other)])
    assert found is not None and (found.test, found.seeds) == ("McNemar", 1)
    assert found.p == pytest.approx(2 * binom.cdf(2, 11, 0.5))
    same = paired_test([outcomes(one)], [outcomes(one)])
    assert same is not None and same.p == 1.0


@pytest.mark.parametrize(("metric", "scale"), [("mean", np.asarray), ("geometric_mean", np.log)])
def test_graded_answers_are_compared_by_flipping_signs(metric: str, scale: Callable[[Any], Any]) -> None:
    rng = np.random.default_rng(4)
    one, other = rng.random(10) ** 3, rng.random(10) ** 3 * 0.7
    found = paired_test([outcomes(one, metric)], [outcomes(other, metric)])
    assert found is not None and found.test == "sign flips"
    difference = scale(one) - scale(other)
    sums = [abs(np.dot(signs, difference)) for signs in product((-1, 1), repeat=10)]
    exact = np.mean(np.array(sums) >= abs(difference.sum()) - 1e-12)
    assert found.p == pytest.approx(exact, abs=0.02)


def test_weights_of_tasks_count_in_tests_and_intervals() -> None:
    better, worse = outcomes([1.0] * 30), outcomes([0.0] * 30)
    same = [0.0, 1.0] * 15
    heavy = paired_test([better, outcomes(same, weight=1)], [worse, outcomes(same, weight=1)])
    assert heavy is not None and heavy.test == "sign flips" and heavy.p < 0.001
    low, high = score_interval([outcomes([1.0] * 50, weight=3), outcomes([0.0] * 50, weight=1)])
    assert (low, high) == (0.75, 0.75)
    graded = np.linspace(0.2, 0.8, 40)
    assert score_interval([outcomes(graded)]) == confidence_interval(graded)


def test_examples_and_seeds_must_pair() -> None:
    one = outcomes([1, 0])
    assert paired_test([one], [outcomes([1])]) is None
    assert paired_test([one], [replace(one, fingerprint="of other examples")]) is None
    assert paired_test([one], [replace(one, seeds=(7,))]) is None
    assert paired_test([one], []) is None


def test_outcomes_that_do_not_depend_on_the_seed_are_one_seeds() -> None:
    rng = np.random.default_rng(1)
    one, other = ((rng.random(80) < share).astype(float) for share in (0.7, 0.5))
    alone = paired_test([outcomes(one)], [outcomes(other)])
    repeated = paired_test([outcomes([one] * 3)], [outcomes([other] * 3)])
    assert alone is not None and repeated is not None
    assert (repeated.p, repeated.test, repeated.seeds) == (alone.p, "McNemar", 3)
    assert score_interval([outcomes([one] * 3)]) == score_interval([outcomes(one)])


def test_seeds_without_a_result_are_left_out() -> None:
    rng = np.random.default_rng(2)
    one, other = rng.random((3, 40)), rng.random((3, 40))
    gap = replace(outcomes(one[[0, 2]]), seeds=(0, 2))
    found = paired_test([gap], [outcomes(other)])
    kept = paired_test([outcomes(one[[0, 2]])], [outcomes(other[[0, 2]])])
    assert found == kept and found is not None and found.seeds == 2


def test_where_only_seeds_differ_it_is_students_test_on_the_seeds_scores() -> None:
    scores = np.array([0.61, 0.58, 0.66, 0.63])
    table, other = np.repeat(scores[:, None], 50, axis=1), np.full((4, 50), 0.6)
    found = paired_test([outcomes(table)], [outcomes(other)])
    assert found is not None and found.test == "seeds x examples"
    assert found.p == pytest.approx(ttest_1samp(scores - 0.6, 0).pvalue, rel=1e-6)
    half = student.ppf(0.975, 3) * scores.std(ddof=1) / 2
    assert score_interval([outcomes(table)]) == pytest.approx((scores.mean() - half, scores.mean() + half))


def test_parts_of_the_variance_add_up() -> None:
    rng = np.random.default_rng(5)
    rows, columns = 0.02 * rng.standard_normal((4, 1)), 0.2 * rng.standard_normal((1, 60))
    table = 0.5 + rows + columns  # without interaction, so that the two parts are plain variances of means
    by_seeds, by_examples = rows.var(ddof=1) / 4, columns.var(ddof=1) / 60
    limit = by_seeds * student.ppf(0.975, 3) + by_examples * student.ppf(0.975, 59)
    half = limit / np.sqrt(by_seeds + by_examples)
    low, high = score_interval([outcomes(table)])
    assert (low, high) == pytest.approx((table.mean() - half, table.mean() + half))
    # The interval ends where the test says 0.05.
    shifted = paired_test([outcomes(table)], [outcomes(np.full((4, 60), low))])
    assert shifted is not None and shifted.p == pytest.approx(0.05, rel=1e-6)
    # Two tasks have the seeds in common and their examples apart.
    other = outcomes(0.5 + rows + np.zeros((1, 30)), weight=3)
    low, high = score_interval([outcomes(table), other])
    mean, by_examples = (table.mean() + 3 * other.values.mean()) / 4, by_examples / 16
    limit = by_seeds * student.ppf(0.975, 3) + by_examples * student.ppf(0.975, 29)
    assert (mean - low, high - mean) == pytest.approx([limit / np.sqrt(by_seeds + by_examples)] * 2)


def test_a_geometric_mean_is_compared_on_its_own_scale() -> None:
    rng = np.random.default_rng(6)
    values = np.exp(-rng.random((3, 50)))
    low, high = score_interval([outcomes(values, "geometric_mean")])
    scores = np.exp(np.log(values).mean(axis=1))
    assert (low + high) / 2 == pytest.approx(scores.mean())
    spread = np.sqrt(sum((np.log(row).std() * score / 3) ** 2 / 50 for row, score in zip(values, scores, strict=True)))
    assert 2 * 1.5 * spread < high - low < 2 * 5 * spread  # the delta method's, widened for few seeds


@pytest.mark.parametrize("seeds", [1, 3])
def test_perplexities_of_several_texts_are_averaged_by_their_logarithms(seeds: int) -> None:
    rng = np.random.default_rng(8)
    logs = [-level - rng.random((seeds, 50)) for level in (1.0, 4.0)]
    low, high = score_interval([outcomes(np.exp(rows), "inverse_perplexity") for rows in logs])
    centre = np.mean([rows.mean() for rows in logs])
    assert np.log([low, high]).mean() == pytest.approx(centre, abs=0.01)
    # Ten per cent more likely on either text is the same gain, however unlikely the text is.
    better = [[rows + 0.1 * (place == text) for place, rows in enumerate(logs)] for text in (0, 1)]
    found = [
        paired_test(
            [outcomes(np.exp(rows + 0.01 * noise), "inverse_perplexity") for rows in some],
            [outcomes(np.exp(rows), "inverse_perplexity") for rows in logs],
        )
        for noise in [rng.standard_normal((seeds, 50))]
        for some in better
    ]
    assert found[0] is not None and found[1] is not None and found[0].p == pytest.approx(found[1].p, rel=0.5)


def differing(rng: np.random.Generator, seeds: int, by_seed: float) -> tuple[NDArray[Any], NDArray[Any]]:
    """Right-or-wrong outcomes of a searched model with every seed, and of one that no seed changes; they are equals."""
    hard = 0.4 * (rng.random((1, 200)) - 0.5)
    share = np.clip(0.6 + by_seed * rng.standard_normal((seeds, 1)) + hard, 0, 1)
    one = (rng.random((seeds, 200)) < share).astype(float)
    other = (rng.random((1, 200)) < 0.6 + hard).astype(float)
    return one, other.repeat(seeds, axis=0)


@pytest.mark.parametrize(("seeds", "by_seed", "least"), [(3, 0.12, 0.02), (5, 0.0, 0.005)])
def test_equal_methods_seldom_differ_significantly_whatever_the_seeds_do(
    seeds: int, by_seed: float, least: float
) -> None:
    rng, count = np.random.default_rng(7), 150
    found, averaged, covered = 0, 0, 0
    for _ in range(count):
        one, other = differing(rng, seeds, by_seed)
        test = paired_test([outcomes(one)], [outcomes(other)])
        assert test is not None
        found += test.p < 0.05
        low, high = score_interval([outcomes(one)])
        covered += low <= 0.6 <= high
        differences = (one - other).mean(axis=0)  # what counts the variance of examples alone
        averaged += 2 * norm.sf(abs(differences.mean()) / (differences.std(ddof=1) / np.sqrt(200))) < 0.05
    assert least < found / count < 0.085
    assert covered / count > 0.92
    if by_seed:
        assert averaged / count > 0.15


def test_holms_correction_of_a_worked_example() -> None:
    # By hand: 0.005 x 4, 0.01 x 3, 0.03 x 2, and 0.04 x 1, which can't be less than the one before.
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([]) == [] and holm([0.2, None]) == [0.2, None] and holm([0.6, None, 0.9]) == [1.0, None, 1.0]
