"""Clusters of equal size: balanced k-means, and assigning points to clusters at low or least cost."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

# Path costs that differ by less than this share of the largest cost count as equal, so that paths have no cycles.
_ROUNDS = 30
_TOLERANCE = 1e-12


def balanced_kmeans(points: NDArray[np.float32], clusters: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """Divide points, float32 [points, features], into clusters of equal size, a divisor of the number of points.

    Lloyd's algorithm with a balanced assignment in each round, from k-means++ centres, until no point moves.

    Returns:
        Cluster of every point, int64 [points]. Clusters are numbered in order of their first points.
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
    """Assign points to clusters of `capacity` points each at low total cost, by a greedy algorithm.

    Every point applies to its cheapest cluster with free places. A cluster with too many applicants takes those whose
    second choice would cost them most. `optimal_assignment` finds the optimum, but takes longer; see there for the
    arguments.
    """
    points, clusters = cost.shape
    labels = np.full(points, -1, dtype=np.int64)
    free = np.full(clusters, capacity)
    while (waiting := np.flatnonzero(labels < 0)).size:
        offers = np.where(free > 0, cost[waiting], np.inf)
        first = offers.argmin(axis=1)
        regret = np.sort(offers, axis=1)[:, 1] - offers.min(axis=1) if clusters > 1 else np.zeros(len(waiting))
        for cluster in np.unique(first):
            asking = np.flatnonzero(first == cluster)
            taken = asking[np.argsort(-regret[asking], kind="stable")[: free[cluster]]]
            labels[waiting[taken]] = cluster
            free[cluster] -= len(taken)
    return labels


def optimal_assignment(cost: NDArray[np.floating], capacity: int) -> NDArray[np.int64]:
    """Assign points to clusters of `capacity` points each at the least total cost.

    This is a transportation problem, solved by successive shortest paths. Every point starts in its cheapest cluster.
    Then, repeatedly, the largest cluster passes a point on along the cheapest path of clusters to one with a free
    place, where a step between two clusters costs what their cheapest point to move costs. A path takes about `points +
    clusters^3` operations; a general assignment solver would take `points^2`.

    Args:
        cost: Finite costs, [points, clusters].
        capacity: Points per cluster, points / clusters.

    Returns:
        Cluster of every point, int64 [points].
    """
    clusters = cost.shape[1]
    labels = cost.argmin(axis=1).astype(np.int64)
    steps = np.zeros((clusters, clusters))
    movers = np.zeros((clusters, clusters), dtype=np.int64)
    tolerance = _TOLERANCE * float(np.abs(cost).max(initial=0.0))

    def update_steps(cluster: int) -> None:
        members = np.flatnonzero(labels == cluster)
        if not len(members):
            steps[cluster] = np.inf
            return
        changes = cost[members] - cost[members, cluster, None]
        first = changes.argmin(axis=0)
        steps[cluster], movers[cluster] = changes[first, np.arange(clusters)], members[first]

    for cluster in range(clusters):
        update_steps(cluster)
    counts = np.bincount(labels, minlength=clusters)
    while (counts > capacity).any():
        path = _shortest_path(steps, int(counts.argmax()), counts < capacity, tolerance)
        moved = [(int(movers[here, there]), there) for here, there in pairwise(path)]
        for point, there in moved:
            labels[point] = there
        counts[path[0]] -= 1
        counts[path[-1]] += 1
        for cluster in path:
            update_steps(cluster)
    return labels


def _shortest_path(steps: NDArray[np.float64], start: int, free: NDArray[np.bool_], tolerance: float) -> list[int]:
    """Clusters on the cheapest path from `start` to any with a free place, by the Bellman-Ford algorithm."""
    clusters = len(steps)
    reached = np.full(clusters, np.inf)
    reached[start] = 0.0
    before = np.full(clusters, start)
    for _ in range(clusters - 1):
        through = reached[:, None] + steps
        best = through.argmin(axis=0)
        fresh = through[best, np.arange(clusters)]
        better = fresh < reached - tolerance
        if not better.any():
            break
        reached[better], before[better] = fresh[better], best[better]
    path = [int(np.where(free, reached, np.inf).argmin())]
    while path[0] != start:
        path.insert(0, int(before[path[0]]))
    return path


def number_by_first(labels: NDArray[np.int64]) -> NDArray[np.int64]:
    """Renumber clusters in order of their first points."""
    names, firsts = np.unique(labels, return_index=True)
    numbers = np.empty(len(names), dtype=np.int64)
    numbers[np.argsort(firsts)] = np.arange(len(names))
    return numbers[np.searchsorted(names, labels)]


def _spread_centres(points: NDArray[np.float32], clusters: int, rng: np.random.Generator) -> NDArray[np.float32]:
    """Centres by k-means++: points drawn in proportion to their squared distance to the nearest centre so far."""
    chosen = [int(rng.integers(len(points)))]
    nearest = _squared_distances(points, points[chosen])[:, 0].astype(np.float64)
    while len(chosen) < clusters:
        nearest[chosen] = 0
        # If all points coincide with centres, draw uniformly.
        weights = nearest if nearest.sum() > 0 else np.ones(len(points))
        chosen.append(int(rng.choice(len(points), p=weights / weights.sum())))
        nearest = np.minimum(nearest, _squared_distances(points, points[chosen[-1:]])[:, 0])
    return points[chosen]


def _squared_distances(points: NDArray[np.float32], centres: NDArray[np.float32]) -> NDArray[np.float32]:
    squares = (points**2).sum(axis=1)[:, None] + (centres**2).sum(axis=1)[None]
    return np.maximum(squares - 2 * points @ centres.T, 0)
