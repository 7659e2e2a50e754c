"""Metrics for Prometheus, computed from the store, so that all servers of one store report the same."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from moevolve.store.reader import StoreReader
from moevolve.store.records import SEARCH_STATUSES


class _SearchCollector(Collector):
    """Counts of all searches of a store, and the progress of those that run."""

    def __init__(self, store: StoreReader) -> None:
        self._store = store

    def collect(self) -> Iterator[Metric]:
        searches, controls = self._store.searches(), self._store.controls()
        by_status = GaugeMetricFamily(
            "moevolve_searches", "Number of searches in the store, by status.", labels=["status"]
        )
        for status in SEARCH_STATUSES:
            by_status.add_metric([status], sum(row.search.status == status for row in searches))
        individuals = GaugeMetricFamily(
            "moevolve_individuals", "Number of individuals, by status.", labels=["search", "status"]
        )
        best = GaugeMetricFamily("moevolve_best_fitness", "Fitness of a search's best individual.", labels=["search"])
        alive = GaugeMetricFamily("moevolve_alive", "1 if a process runs the search, else 0.", labels=["search"])
        total = GaugeMetricFamily(
            "moevolve_individuals_planned", "Individuals that the whole search will have.", labels=["search"]
        )
        rate = GaugeMetricFamily("moevolve_evaluations_per_second", "Pace of a running search.", labels=["search"])
        eta = GaugeMetricFamily("moevolve_seconds_left", "Time left at the current pace.", labels=["search"])
        for row in searches:
            name, control = row.search.name, controls[row.search.id]
            for what, count in {"ok": row.evaluated, "failed": row.failed, "pending": row.pending}.items():
                individuals.add_metric([name, what], count)
            if row.best_fitness is not None:
                best.add_metric([name], row.best_fitness)
            alive.add_metric([name], control.alive)
            if control.progress is not None and control.alive:
                total.add_metric([name], control.progress.total)
                for family, value in ((rate, control.progress.rate), (eta, control.progress.left)):
                    if value is not None:
                        family.add_metric([name], value)
        yield from (by_status, individuals, best, alive, total, rate, eta)


def metrics_text(store: StoreReader) -> bytes:
    """The metrics of a store in Prometheus' text format."""
    registry = CollectorRegistry()
    registry.register(_SearchCollector(store))
    return generate_latest(registry)
