"""How many workers a running search is to have: what other searches on its cluster leave it."""

from __future__ import annotations

import time

from moevolve.search.config.run import WorkersSection
from moevolve.search.pools.ray_cluster import cluster_name, cluster_nodes
from moevolve.search.pools.shares import contender_of, shares
from moevolve.search.running.lease_heartbeat import LeaseHeartbeat
from moevolve.store.records import Control, ResourceRequest

_LOOK_S = 1.0
"""How often the cluster is looked at."""


class Share:
    """A search's share of the cluster that it has joined.

    Args:
        workers: its settings.
        useful: individuals that it evaluates at once; more workers would be idle.
    """

    def __init__(self, workers: WorkersSection, useful: int) -> None:
        self._workers, self._useful = workers, useful
        self._count = workers.least
        self._looked = -_LOOK_S

    def claim(self) -> ResourceRequest | None:
        """What other drivers are to know; nothing before it has joined a cluster."""
        cluster, workers = cluster_name(), self._workers
        if cluster is None:
            return None
        return ResourceRequest(cluster, workers.least, workers.most(self._useful), workers.num_cpus, workers.num_gpus)

    def due(self, driving: LeaseHeartbeat, control: Control) -> int:
        """Workers that it is to have now.

        Args:
            driving: that knows what others could use.
            control: what is asked of this search.
        """
        if control.workers is not None:
            return control.workers
        now = time.monotonic()
        if driving.running_searches is not None and self._workers.count == "auto" and now - self._looked >= _LOOK_S:
            self._count, self._looked = self._shared(driving.lease.search_id, control, driving.running_searches), now
        return self._count

    def _shared(self, search: str, control: Control, running: dict[str, Control]) -> int:
        own, nodes = self.claim(), cluster_nodes()
        if own is None or nodes is None:
            return self._count
        others = [
            contender_of(other, each, each.claim)
            for other, each in running.items()
            if other != search and each.claim is not None and each.claim.cluster == own.cluster
        ]
        return shares(nodes, [contender_of(search, control, own), *others])[search]
