"""What Prometheus asks for, read from the store: so any server tells the same, and none has to have seen it happen."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from moevolve.store.reader import StoreReader
from moevolve.store.records import SEARCH_STATUSES


class _Searches(Collector):
    """All searches of a store; of those that run, where they stand."""

    def __init__(self, store: StoreReader) -> None:
        self._store = store

    def collect(self) -> Iterator[Metric]:
        searches, controls = self._store.searches(), self._store.controls()
        by_status = GaugeMetricFamily("moevolve_searches", "Searches of the store.", labels=["status"])
        for status in SEARCH_STATUSES:
            by_status.add_metric([status], sum(row.search.status == status for row in searches))
        individuals = GaugeMetricFamily("moevolve_individuals", "Individuals.", labels=["search", "status"])
        best = GaugeMetricFamily("moevolve_best_fitness", "Fitness of a search's best individual.", labels=["search"])
        alive = GaugeMetricFamily("moevolve_alive", "Whether a process runs the search.", labels=["search"])
        total = GaugeMetricFamily("moevolve_individuals_planned", "Individuals of the whole search.", labels=["search"])
        rate = GaugeMetricFamily("moevolve_evaluations_per_second", "Of a search that runs.", labels=["search"])
        left = GaugeMetricFamily("moevolve_seconds_left", "Of a search that runs, at its pace.", labels=["search"])
        for row in searches:
            name, control = row.search.name, controls[row.search.id]
            for what, count in {"ok": row.evaluated, "failed": row.failed, "pending": row.pending}.items():
                individuals.add_metric([name, what], count)
            if row.best_fitness is not None:
                best.add_metric([name], row.best_fitness)
            alive.add_metric([name], control.alive)
            if control.progress is not None and control.alive:
                total.add_metric([name], control.progress.total)
                for family, value in ((rate, control.progress.rate), (left, control.progress.left)):
                    if value is not None:
                        family.add_metric([name], value)
        yield from (by_status, individuals, best, alive, total, rate, left)


def exposition(store: StoreReader) -> bytes:
    """The metrics of a store in Prometheus' text format."""
    registry = CollectorRegistry()
    registry.register(_Searches(store))
    return generate_latest(registry)
