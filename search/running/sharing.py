"""The number of workers of a running search on a cluster that searches share."""

from __future__ import annotations

import time

from moevolve.search.config.run import WorkersSection
from moevolve.search.pools.ray_cluster import cluster_name, cluster_nodes
from moevolve.search.pools.shares import contender_of, shares
from moevolve.search.running.lease_heartbeat import LeaseHeartbeat
from moevolve.store.records import Control, ResourceRequest

_UPDATE_S = 1.0
"""Interval at which the shares are computed again."""


class ClusterShare:
    """A search's share of the cluster that it has joined.

    Args:
        workers: The search's settings of workers.
        useful: Largest number of individuals under evaluation at once; more workers would be idle.
    """

    def __init__(self, workers: WorkersSection, useful: int) -> None:
        self._workers, self._useful = workers, useful
        self._count = workers.least
        self._updated = -_UPDATE_S

    def request(self) -> ResourceRequest | None:
        """The resources that the search could use, for other drivers; None before it has joined a cluster."""
        cluster, workers = cluster_name(), self._workers
        if cluster is None:
            return None
        return ResourceRequest(cluster, workers.least, workers.most(self._useful), workers.num_cpus, workers.num_gpus)

    def workers_due(self, heartbeat: LeaseHeartbeat, control: Control) -> int:
        """The number of workers that the search should have now.

        Args:
            heartbeat: Source of the other searches' requests.
            control: Control of this search.
        """
        if control.workers is not None:
            return control.workers
        now = time.monotonic()
        if (
            heartbeat.running_searches is not None
            and self._workers.count == "auto"
            and now - self._updated >= _UPDATE_S
        ):
            self._count, self._updated = (
                self._shared(heartbeat.lease.search_id, control, heartbeat.running_searches),
                now,
            )
        return self._count

    def _shared(self, search: str, control: Control, running: dict[str, Control]) -> int:
        own, nodes = self.request(), cluster_nodes()
        if own is None or nodes is None:
            return self._count
        others = [
            contender_of(other, each, each.claim)
            for other, each in running.items()
            if other != search and each.claim is not None and each.claim.cluster == own.cluster
        ]
        return shares(nodes, [contender_of(search, control, own), *others])[search]
