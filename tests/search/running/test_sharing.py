"""Searches of one cluster and one store: each driver finds its share in what the others say."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
from store_samples import search
from waiting import PATIENT_S, until

from moevolve.search.config.run import WorkersSection
from moevolve.search.pools.shares import Node
from moevolve.search.running import execute, lease_heartbeat
from moevolve.search.running.execute import ClusterShare
from moevolve.search.running.lease_heartbeat import LeaseHeartbeat
from moevolve.store.records import ResourceRequest
from moevolve.store.repository import Store

LEASE_S = PATIENT_S
"""So that a machine that stands still for a while loses no lease; it is renewed every `BEAT_S`."""
BEAT_S = 0.1


@pytest.fixture
def store(store: Store) -> Store:
    for name in "abc":
        store.create_search(search(id=name, name=f"search-{name}"), [])
    return store


class Drivers:
    """Drivers of searches on a cluster of nodes with CPUs only."""

    def __init__(self, store: Store, patch: pytest.MonkeyPatch) -> None:
        self.nodes: list[Node] | None = [Node(4, 0)]
        self.cluster: str | None = "here"
        self.driving: dict[str, LeaseHeartbeat] = {}
        self._store, self._due = store, dict[str, Callable[[], int]]()
        self._stack = ExitStack()
        patch.setattr(execute, "cluster_nodes", lambda: self.nodes)
        patch.setattr(execute, "cluster_name", lambda: self.cluster)
        patch.setattr(execute, "_UPDATE_S", 0.0)
        patch.setattr(lease_heartbeat, "_BEAT_S", BEAT_S)

    def start(self, name: str, useful: int = 8, **settings: object) -> None:
        workers = WorkersSection(**{"count": "auto", **settings})  # type: ignore[arg-type]
        share = ClusterShare(workers, useful)
        driving = self._stack.enter_context(LeaseHeartbeat(self._store, name, LEASE_S, workers.priority, share.request))
        self.driving[name] = driving
        self._due[name] = lambda: share.workers_due(driving, driving.control)

    def come_to(self, **expected: int) -> None:
        deadline = time.monotonic() + PATIENT_S
        while (found := {name: self._due[name]() for name in expected}) != expected:
            assert time.monotonic() < deadline, f"{found} instead of {expected}"
            time.sleep(0.05)

    def close(self) -> None:
        self._stack.close()


@pytest.fixture
def drivers(store: Store, monkeypatch: pytest.MonkeyPatch) -> Iterator[Drivers]:
    found = Drivers(store, monkeypatch)
    yield found
    found.close()


def test_searches_share_a_cluster(drivers: Drivers, store: Store) -> None:
    drivers.start("a")
    drivers.come_to(a=4)
    drivers.start("b", max=3)
    drivers.come_to(a=2, b=2)
    store.ask("b", priority=1)
    drivers.come_to(a=1, b=3)
    drivers.nodes = [Node(4, 0), Node(1, 0)]
    drivers.come_to(a=2, b=3)
    store.ask("b", "paused")
    drivers.come_to(a=5)
    store.ask("b", "running", workers=1)
    drivers.come_to(a=4, b=1)
    drivers.start("c", count=2, priority=-1)  # a fixed count, below all others, is kept
    drivers.come_to(a=2, b=1, c=2)
    drivers.nodes = None  # the head doesn't answer: everything stays
    store.ask("b", workers=2)
    drivers.come_to(a=2, b=2, c=2)


def test_those_of_another_cluster_are_left_alone(drivers: Drivers, store: Store) -> None:
    drivers.start("a", useful=3)
    drivers.come_to(a=3)
    drivers.cluster = "there"
    with LeaseHeartbeat(store, "b", LEASE_S, 5, lambda: ResourceRequest("elsewhere", 4, 4, 1, 0)):
        until(lambda: "b" in (seen := drivers.driving["a"].running_searches or {}) and seen["b"].claim is not None)
        drivers.come_to(a=3)
    assert store.control("b").claim is None, "what a driver says ends with it"


def test_a_search_that_has_joined_no_cluster_has_what_it_always_has(drivers: Drivers) -> None:
    drivers.cluster = None
    drivers.start("a", min=2)
    time.sleep(5 * BEAT_S)
    drivers.come_to(a=2)
