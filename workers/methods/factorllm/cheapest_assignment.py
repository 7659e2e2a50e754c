"""Points given to clusters of equal size at the least cost there is."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

_ROUNDING = 1e-12
"""What differs by less, as a share of the largest cost, is the same: no path goes round in circles for it."""


def cheapest_assignment(cost: NDArray[np.floating], capacity: int) -> NDArray[np.int64]:
    """Give every point to one of the clusters, each taking `capacity` points, at the least total cost.

    A transportation problem by successive shortest paths: every point begins in its cheapest cluster; then, again and
    again, one moves out of a cluster that has too many, by way of others where that is cheaper, into one that has room.
    Paths lead over the few clusters, a step from one to another costing what its cheapest point to move costs. So a
    move takes about `points + clusters^3` operations, where an assignment of points to places takes `points^2`.

    Args:
        cost: [points, clusters], finite.
        capacity: points / clusters.

    Returns:
        The cluster of every point, int64 [points].
    """
    clusters = cost.shape[1]
    labels = cost.argmin(axis=1).astype(np.int64)
    steps = np.zeros((clusters, clusters))
    movers = np.zeros((clusters, clusters), dtype=np.int64)
    tolerance = _ROUNDING * float(np.abs(cost).max(initial=0.0))

    def look(cluster: int) -> None:
        """Find out again what it costs to move a point of a cluster to each of the others."""
        members = np.flatnonzero(labels == cluster)
        if not len(members):
            steps[cluster] = np.inf
            return
        changes = cost[members] - cost[members, cluster, None]
        first = changes.argmin(axis=0)
        steps[cluster], movers[cluster] = changes[first, np.arange(clusters)], members[first]

    for cluster in range(clusters):
        look(cluster)
    counts = np.bincount(labels, minlength=clusters)
    while (counts > capacity).any():
        path = _shortest_path(steps, int(counts.argmax()), counts < capacity, tolerance)
        moved = [(int(movers[here, there]), there) for here, there in pairwise(path)]
        for point, there in moved:
            labels[point] = there
        counts[path[0]] -= 1
        counts[path[-1]] += 1
        for cluster in path:
            look(cluster)
    return labels


def _shortest_path(steps: NDArray[np.float64], start: int, room: NDArray[np.bool_], tolerance: float) -> list[int]:
    """The clusters on the cheapest path from one to any that has room, by the algorithm of Bellman and Ford."""
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
    path = [int(np.where(room, reached, np.inf).argmin())]
    while path[0] != start:
        path.insert(0, int(before[path[0]]))
    return path
