"""The number of workers of each search on a shared cluster.

Ray has no priorities between jobs. So every driver computes all shares itself, from the cluster's nodes and the
requests that all drivers write to the store; drivers that read the same compute the same. While they differ, for about
a second, Ray queues workers that have no room. No individual depends on the shares.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from moevolve.store.records import Control, ResourceRequest

_GRAIN = 1e-6
"""Tolerance for fractions of a CPU or a GPU; Ray counts in 1e-4."""


@dataclass(frozen=True, slots=True)
class Node:
    """Total or free CPUs and GPUs of one node, in Ray's units."""

    cpus: float
    gpus: float


@dataclass(frozen=True, slots=True)
class Contender:
    """A search that shares a cluster.

    Attributes:
        search: Id of the search.
        priority: Searches with a higher priority get workers beyond `least` first.
        least: Number of workers that the search keeps, even without room for them.
        most: Largest number of workers that the search can use.
        cpus, gpus: CPUs and GPUs that each worker reserves.
    """

    search: str
    priority: int
    least: int
    most: int
    cpus: float
    gpus: float


def contender_of(search: str, control: Control, request: ResourceRequest) -> Contender:
    """A search's present demand: no workers unless it runs, and the exact number that its user has set, if any."""
    least, most = request.least, request.most
    if control.desired_state != "running":
        least = most = 0
    elif control.workers is not None:
        least = most = control.workers
    return Contender(search, control.priority, least, most, request.cpus, request.gpus)


def shares(nodes: Sequence[Node], contenders: Sequence[Contender]) -> Mapping[str, int]:
    """Divide a cluster's workers among its searches.

    First every search gets `least`. The remaining room goes to the highest priority, one worker at a time to the search
    that has the fewest, until none can use more or no node has room; then to the next priority.

    Args:
        nodes: Total resources of the cluster's nodes; a worker needs room on a single one.
        contenders: The searches, in any order.

    Returns:
        Number of workers by search id.
    """
    free = list(nodes)
    order = sorted(contenders, key=lambda one: (-one.priority, one.search))
    for one in order:
        for _ in range(one.least):
            _take(free, one)
    given = {one.search: one.least for one in order}
    for priority in dict.fromkeys(one.priority for one in order):
        takers = [one for one in order if one.priority == priority and given[one.search] < one.most]
        while takers:
            one = min(takers, key=lambda each: given[each.search])
            if _take(free, one):
                given[one.search] += 1
            else:
                takers.remove(one)
            takers = [one for one in takers if given[one.search] < one.most]
    return given


def _take(free: list[Node], one: Contender) -> bool:
    """Reserve a worker on the fullest node with room for it; False if there is none."""
    fitting = [
        (node.gpus, node.cpus, place)
        for place, node in enumerate(free)
        if node.cpus - one.cpus > -_GRAIN and node.gpus - one.gpus > -_GRAIN
    ]
    if not fitting:
        return False
    gpus, cpus, place = min(fitting)
    free[place] = Node(cpus - one.cpus, gpus - one.gpus)
    return True
