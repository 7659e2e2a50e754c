"""The share of a score that is kept, and its bounds, for every kind of outcome."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from moevolve.evaluators.errors import UserError
from moevolve.search.loop.significance import TaskOutcomes
from moevolve.search.results.kept import kept_share


def task(values: NDArray[np.float64] | list[float], metric: str = "accuracy", weight: float = 1.0) -> TaskOutcomes:
    return TaskOutcomes(np.array(values, dtype=np.float64)[None], metric, weight)


def right(rows: int, of: int) -> NDArray[np.float64]:
    return np.arange(of) < rows


def test_of_right_answers_it_is_the_ratio_and_few_rows_prove_little() -> None:
    kept = kept_share([task(right(180, 300))], [task(right(200, 300))])
    assert kept.share == pytest.approx(0.9) and kept.low < 0.9 < kept.high < 1
    lows = [kept_share([task(right(n, n))], [task(right(n, n))]) for n in (28, 192, 300, 1000)]
    assert [round(each.low, 3) for each in lows] == [0.916, 0.988, 0.992, 0.998]
    assert {each.share for each in lows} == {1.0}
    assert str(lows[2]) == "100.0 % (99.2 - 100.8)"


def test_of_perplexities_it_is_a_share_of_the_log() -> None:
    logs = np.linspace(-4, -2, 200)
    full, worse = (task(np.exp(each), "inverse_perplexity") for each in (logs, logs / 0.98))
    kept = kept_share([worse], [full])
    assert (kept.share, kept.low, kept.high) == pytest.approx((0.98, 0.98, 0.98))
    assert kept_share([full], [worse]).share == pytest.approx(1 / 0.98)


def test_of_other_geometric_means_it_is_the_ratio() -> None:
    ones, some = np.ones(50), np.exp(np.linspace(-0.2, 0, 50))
    kept = kept_share([task(some, "geometric_mean")], [task(ones, "geometric_mean")])
    assert kept.share == pytest.approx(np.exp(-0.1)) and kept.low < kept.share < kept.high


def test_tasks_count_by_weight_or_the_worst_does() -> None:
    one = [task(right(90, 100), weight=3.0), task(right(50, 100))]
    full = [task(right(100, 100), weight=3.0), task(right(100, 100))]
    mean, worst = kept_share(one, full), kept_share(one, full, worst=True)
    assert mean.share == pytest.approx(0.8) and worst.share == pytest.approx(0.5)
    assert worst.low == pytest.approx(kept_share(one[1:], full[1:]).low)


@pytest.mark.parametrize("rows", [60, 400])
def test_the_true_share_is_below_the_lower_bound_in_one_of_twenty_samples_at_most(rows: int) -> None:
    """The full model is right on 90 % of prompts, the candidate on 95 % of those and on 20 % of the others."""
    rng, below = np.random.default_rng(0), 0
    for _ in range(1000):
        full = rng.random(rows) < 0.9
        one = rng.random(rows) < np.where(full, 0.95, 0.2)
        below += kept_share([task(one)], [task(full)]).low > (0.9 * 0.95 + 0.1 * 0.2) / 0.9
    assert below <= 65


def test_there_is_no_share_of_nothing() -> None:
    with pytest.raises(UserError, match="several rows of `dev`, and a full model that scores more than 0"):
        kept_share([task(right(3, 9))], [task(right(0, 9))])
