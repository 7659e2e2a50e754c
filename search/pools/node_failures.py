"""Nodes where workers fail one after the other, on which none is started for a while."""

from __future__ import annotations

import time
from collections.abc import Callable

FAILURES = 3
"""Number of failures in a row after which no worker is started on a node: as many as a worker's failed starts."""
AVOIDED_S = 600.0
"""Seconds for which none is. It may take minutes to restart a node or its driver; if that didn't help, the first
failure afterwards closes the node again."""


class NodeFailures:
    """Counts what failed in a row on each node.

    Args:
        clock: Seconds since some fixed moment.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._failed: dict[str, set[str]] = {}
        self._until: dict[str, float] = {}

    def succeeded(self, node: str) -> None:
        """Note that a worker on a node has done its work."""
        self._failed.pop(node, None)

    def failed(self, node: str, what: str) -> bool:
        """Note a worker's failure on a node.

        Args:
            node: Ray's id of the node.
            what: Name of the work that failed. The same work counts once: it may be what kills workers.

        Returns:
            True if the node is avoided from now on.
        """
        known = self._failed.setdefault(node, set())
        known.add(what)
        if len(known) < FAILURES or node in self.avoided:
            return False
        self._until[node] = self._clock() + AVOIDED_S
        return True

    @property
    def avoided(self) -> frozenset[str]:
        """Ids of the nodes on which no worker is to be started now."""
        now = self._clock()
        return frozenset(node for node, until in self._until.items() if now < until)
