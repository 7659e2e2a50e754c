"""Floors and tallies: a bound never lies below the fitness it bounds, and racing errs as seldom as it says."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moevolve.evaluators.early_stopping import LOOKS, Floor, Tally, most_of, weighted_mean
from moevolve.evaluators.metrics import score
from moevolve.evaluators.types import Example, Matching, PreparedSplit

outcomes_of = st.lists(st.floats(0, 1), min_size=1, max_size=40)
right_or_wrong = st.lists(st.sampled_from([0.0, 1.0]), min_size=1, max_size=40)
weight = st.floats(1e-3, 1e3)


def floor_of(least: float, count: int, weights: tuple[float, ...] = (), **other: float) -> Floor:
    weights = weights or (1.0,) * count
    splits = tuple(f"s{i}" for i in range(count))
    return Floor(least, splits, weights, (1.0,) * count, (1,) * count, **other)


def seen_part(outcomes: list[float], seen: int) -> Tally:
    values = np.array(outcomes, dtype=np.float64)
    values[seen:] = np.nan
    return Tally.of(values)


@given(tasks=st.lists(st.tuples(outcomes_of | right_or_wrong, weight), min_size=1, max_size=4), data=st.data())
def test_a_bound_is_never_below_the_fitness(tasks: list[tuple[list[float], float]], data: st.DataObject) -> None:
    """Bit for bit: at every prefix of every task, a candidate is rejected only if it ends below the floor."""
    weights = tuple(each for _, each in tasks)
    penalty = data.draw(st.floats(0, 0.5))
    scores = [score("mean", outcomes) for outcomes, _ in tasks]
    fitness = weighted_mean(scores, weights) - penalty
    least = data.draw(st.sampled_from([fitness, math.nextafter(fitness, 2), 0.5]) | st.floats(-0.5, 1))
    floor = floor_of(least, len(tasks), weights, penalty=penalty)
    for place, (outcomes, _) in enumerate(tasks):
        name, before = f"s{place}", floor.bound
        for seen in range(1, len(outcomes) + 1):
            tally = seen_part(outcomes, seen)
            bound = floor.knowing(name, tally.most).bound
            assert fitness <= bound <= before
            if floor.rejects(name, tally):
                assert fitness < least
            before = bound
        floor = floor.knowing(name, scores[place])
    assert floor.bound == fitness
    assert floor.out_of_reach == (fitness < least)


def test_reaching_the_floor_exactly_is_enough() -> None:
    floor = floor_of(0.5, 1)
    assert not floor.rejects("s0", seen_part([0, 0, 1, 1], 2))
    assert floor.rejects("s0", seen_part([0, 0, 0, 1], 3))
    assert not floor.rejects("tie-break", seen_part([0, 0, 0, 1], 3)), "a split that doesn't count"


def test_a_split_without_a_bound_keeps_a_candidate_alive() -> None:
    split = PreparedSplit("t", "search", "rank", "accuracy", Matching(), 1, " ", (Example("p", ("a",), ("a", "b")),))
    assert most_of(split) == 1.0
    assert most_of(replace(split, fitness="perplexity", metric="geometric_mean")) == math.inf
    assert most_of(replace(split, fitness="generate", metric="geometric_mean")) == math.inf
    floor = replace(floor_of(0.9, 2), most=(1.0, math.inf))
    assert not floor.rejects("s0", seen_part([0, 0, 0], 3))
    assert floor.knowing("s1", 0.5).rejects("s0", seen_part([0, 0, 0], 3))


@pytest.mark.parametrize("share", [0.2, 0.5, 0.8])
def test_racing_rejects_wrongly_as_seldom_as_it_says(share: float) -> None:
    """Candidates that reach the floor exactly, their examples in random order, looked at after each eighth."""
    rng, alpha, count, trials = np.random.default_rng(4), 0.2, 80, 600
    right = int(share * count)
    floor = floor_of(right / count, 1, alpha=alpha)
    outcomes = np.array([1.0] * right + [0.0] * (count - right))
    wrong = 0
    for _ in range(trials):
        order = list(rng.permutation(outcomes))
        wrong += any(floor.rejects("s0", seen_part(order, look * count // LOOKS)) for look in range(1, LOOKS))
    assert wrong / trials <= alpha


def test_the_bound_on_right_ones_is_the_hypergeometric_one() -> None:
    outcomes = np.array([1.0] * 3 + [0.0] * 7 + [np.nan] * 20)
    level = 0.16 / LOOKS

    def few(total: int) -> float:
        ways = sum(math.comb(total, j) * math.comb(30 - total, 10 - j) for j in range(4))
        return ways / math.comb(30, 10)

    expected = max(total for total in range(3, 24) if few(total) >= level)
    assert Tally.of(outcomes).likely_most(0.16) == expected / 30
    assert 3 < expected < 23


def test_racing_rejects_what_is_far_below_sooner_than_certainty_does() -> None:
    outcomes = [1.0, 0.0, 0.0, 0.0, 0.0] * 80
    exact, racing = floor_of(0.6, 1), floor_of(0.6, 1, alpha=0.05)
    first = [next(n for n in range(1, 401) if floor.rejects("s0", seen_part(outcomes, n))) for floor in (exact, racing)]
    assert first[1] < first[0] / 4
