"""k-means with clusters of equal size, where the answer is known."""

from __future__ import annotations

import numpy as np

from moevolve.workers.methods.factorllm.balanced_kmeans import balanced_assignment, balanced_kmeans, number_by_first


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
