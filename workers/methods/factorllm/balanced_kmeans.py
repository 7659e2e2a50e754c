"""k-means with clusters of equal size."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_ROUNDS = 30


def balanced_kmeans(points: NDArray[np.float32], clusters: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """Divide points into equal clusters of near ones.

    Lloyd's rounds with a balanced assignment in each, from k-means++ centres, until nothing moves.

    Args:
        points: float32 [points, features].
        clusters: a divisor of the number of points.
        rng: for the first centres.

    Returns:
        The cluster of every point, int64 [points]; clusters are numbered by their first points.
    """
    centres = _spread_centres(points, clusters, rng)
    labels = np.full(len(points), -1)
    for _ in range(_ROUNDS):
        fresh = balanced_assignment(_squared_distances(points, centres), len(points) // clusters)
        if np.array_equal(fresh, labels):
            break
        labels = fresh
        centres = np.stack([points[labels == cluster].mean(axis=0) for cluster in range(clusters)])
    return number_by_first(labels)


def balanced_assignment(cost: NDArray[np.floating], capacity: int) -> NDArray[np.int64]:
    """Give every point to one of the clusters, each taking `capacity` points, at low total cost.

    Points ask for their cheapest cluster that has room; one asked by too many takes those that would lose most by
    going to their second choice. That is not always the optimum, which costs the cube of the points to find.

    Args:
        cost: [points, clusters], finite.
        capacity: points / clusters.

    Returns:
        The cluster of every point, int64 [points].
    """
    points, clusters = cost.shape
    labels = np.full(points, -1, dtype=np.int64)
    room = np.full(clusters, capacity)
    while (waiting := np.flatnonzero(labels < 0)).size:
        offers = np.where(room > 0, cost[waiting], np.inf)
        first = offers.argmin(axis=1)
        regret = np.sort(offers, axis=1)[:, 1] - offers.min(axis=1) if clusters > 1 else np.zeros(len(waiting))
        for cluster in np.unique(first):
            asking = np.flatnonzero(first == cluster)
            taken = asking[np.argsort(-regret[asking], kind="stable")[: room[cluster]]]
            labels[waiting[taken]] = cluster
            room[cluster] -= len(taken)
    return labels


def number_by_first(labels: NDArray[np.int64]) -> NDArray[np.int64]:
    """The same clusters numbered in order of their first points."""
    names, firsts = np.unique(labels, return_index=True)
    numbers = np.empty(len(names), dtype=np.int64)
    numbers[np.argsort(firsts)] = np.arange(len(names))
    return numbers[np.searchsorted(names, labels)]


def _spread_centres(points: NDArray[np.float32], clusters: int, rng: np.random.Generator) -> NDArray[np.float32]:
    """k-means++: every centre is a point, drawn by its squared distance to the nearest centre so far."""
    chosen = [int(rng.integers(len(points)))]
    nearest = _squared_distances(points, points[chosen])[:, 0].astype(np.float64)
    while len(chosen) < clusters:
        nearest[chosen] = 0
        # Points that all lie on centres are as good as each other.
        weights = nearest if nearest.sum() > 0 else np.ones(len(points))
        chosen.append(int(rng.choice(len(points), p=weights / weights.sum())))
        nearest = np.minimum(nearest, _squared_distances(points, points[chosen[-1:]])[:, 0])
    return points[chosen]


def _squared_distances(points: NDArray[np.float32], centres: NDArray[np.float32]) -> NDArray[np.float32]:
    """[points, centres]."""
    squares = (points**2).sum(axis=1)[:, None] + (centres**2).sum(axis=1)[None]
    return np.maximum(squares - 2 * points @ centres.T, 0)
