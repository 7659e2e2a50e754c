"""Who gets how many of a cluster's workers: decided by every driver for itself, from what all of them say in the store.

Ray itself has no notion of priority between jobs. Drivers that see the same nodes and searches decide the same; while
they don't, for a second, Ray lets workers wait that there is no room for. No individual changes by any of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from moevolve.store.records import Control, ResourceRequest

_GRAIN = 1e-6
"""Shares of a CPU or a GPU that are not told apart; Ray counts in 1e-4."""


@dataclass(frozen=True, slots=True)
class Node:
    """What one node has, or has left.

    Attributes:
        cpus, gpus: in Ray's units.
    """

    cpus: float
    gpus: float


@dataclass(frozen=True, slots=True)
class Contender:
    """A search that shares a cluster.

    Attributes:
        search: its id.
        priority: before searches of lower ones, it gets what it takes beyond `least`.
        least: workers that it keeps, whether there is room for them or not.
        most: workers that it takes.
        cpus, gpus: that each of them reserves.
    """

    search: str
    priority: int
    least: int
    most: int
    cpus: float
    gpus: float


def contender(search: str, control: Control, claim: ResourceRequest) -> Contender:
    """A search as it stands: none of its workers is wanted while it is paused, and just so many if that was asked."""
    least, most = claim.least, claim.most
    if control.desired_state != "running":
        least = most = 0
    elif control.workers is not None:
        least = most = control.workers
    return Contender(search, control.priority, least, most, claim.cpus, claim.gpus)


def shares(nodes: Sequence[Node], contenders: Sequence[Contender]) -> Mapping[str, int]:
    """How many workers each search is to have.

    First everybody gets `least`. What is left goes to the highest priority, one worker at a time to the search that has
    the fewest, until none of them takes more or no node has room; then to the next one.

    Args:
        nodes: of the cluster; a worker is on one of them.
        contenders: in any order.

    Returns:
        Workers by search.
    """
    room = _Room(nodes)
    order = sorted(contenders, key=lambda one: (-one.priority, one.search))
    for one in order:
        for _ in range(one.least):
            room.take(one)
    given = {one.search: one.least for one in order}
    for priority in dict.fromkeys(one.priority for one in order):
        takers = [one for one in order if one.priority == priority and given[one.search] < one.most]
        while takers:
            one = min(takers, key=lambda each: given[each.search])
            if room.take(one):
                given[one.search] += 1
            else:
                takers.remove(one)
            takers = [one for one in takers if given[one.search] < one.most]
    return given


class _Room:
    """What is left of the nodes."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        self._left = list(nodes)

    def take(self, one: Contender) -> bool:
        """Put a worker on the fullest node that has room for it; whether there is one."""
        fitting = [
            (node.gpus, node.cpus, place)
            for place, node in enumerate(self._left)
            if node.cpus - one.cpus > -_GRAIN and node.gpus - one.gpus > -_GRAIN
        ]
        if not fitting:
            return False
        gpus, cpus, place = min(fitting)
        self._left[place] = Node(cpus - one.cpus, gpus - one.gpus)
        return True
