"""Clusters of equal size: k-means on points with a known answer, and least costs against scipy's."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import linear_sum_assignment

from moevolve.workers.methods.factorllm.balanced_clusters import (
    balanced_assignment,
    balanced_kmeans,
    number_by_first,
    optimal_assignment,
)


def test_balanced_kmeans_finds_scattered_clusters() -> None:
    rng = np.random.default_rng(3)
    truth = rng.permutation(np.repeat(np.arange(5), 20))
    points = (rng.standard_normal((5, 7))[truth] * 4 + rng.standard_normal((100, 7)) * 0.3).astype(np.float32)
    found = balanced_kmeans(points, 5, np.random.default_rng(1))
    assert np.array_equal(found, number_by_first(truth))
    same = balanced_kmeans(np.ones((12, 3), np.float32), 4, np.random.default_rng(1))
    assert np.bincount(same).tolist() == [3] * 4


def test_a_balanced_assignment_gives_way_where_it_costs_least() -> None:
    # All prefer cluster 0; the last two lose least by going elsewhere.
    cost = np.array([[0.0, 9.0], [0.0, 8.0], [0.0, 2.0], [0.0, 1.0]])
    assert balanced_assignment(cost, 2).tolist() == [0, 0, 1, 1]
    assert balanced_assignment(np.zeros((3, 1)), 3).tolist() == [0, 0, 0]
    random = np.random.default_rng(0).random((60, 6))
    labels = balanced_assignment(random, 10)
    assert np.bincount(labels).tolist() == [10] * 6
    assert random[np.arange(60), labels].mean() < 0.75 * random.mean()


@given(
    clusters=st.integers(1, 7),
    capacity=st.integers(1, 9),
    kind=st.sampled_from(["random", "ties", "all want one", "huge"]),
    seed=st.integers(0, 10_000),
)
def test_the_cost_is_the_least(clusters: int, capacity: int, kind: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    cost = rng.random((clusters * capacity, clusters))
    if kind == "ties":
        cost = rng.integers(-2, 3, cost.shape).astype(np.float64)
    elif kind == "all want one":
        cost += np.arange(clusters)
    elif kind == "huge":
        cost *= 1e12
    found = optimal_assignment(cost, capacity)
    assert (np.bincount(found, minlength=clusters) == capacity).all()
    places = cost.repeat(capacity, axis=1)
    best = places[linear_sum_assignment(places)].sum()
    assert cost[np.arange(len(cost)), found].sum() == pytest.approx(best, rel=1e-9, abs=1e-9)
