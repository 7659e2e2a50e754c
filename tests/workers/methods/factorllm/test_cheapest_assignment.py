"""Assignments of least cost against scipy's, which knows nothing of clusters."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import linear_sum_assignment

from moevolve.workers.methods.factorllm.cheapest_assignment import cheapest_assignment


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
    found = cheapest_assignment(cost, capacity)
    assert (np.bincount(found, minlength=clusters) == capacity).all()
    places = cost.repeat(capacity, axis=1)
    best = places[linear_sum_assignment(places)].sum()
    assert cost[np.arange(len(cost)), found].sum() == pytest.approx(best, rel=1e-9, abs=1e-9)


def test_the_division_of_a_real_width_takes_steps_per_point_not_per_pair() -> None:
    """Where most points want the same cluster; an assignment of points to places takes minutes here."""
    rng = np.random.default_rng(0)
    cost = rng.random((3000, 6)) + np.arange(6)
    found = cheapest_assignment(cost, 500)
    assert (np.bincount(found) == 500).all()
    chosen = cost[np.arange(3000), found]
    # No two points gain by changing places.
    change = cost[:, found] - chosen[:, None]
    assert (change + change.T).min() > -1e-9
