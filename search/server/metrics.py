"""Routes for monitoring: the health check, and metrics for Prometheus.

Metrics are computed from the store, so that all servers of one store report the same.
"""

from __future__ import annotations

from collections.abc import Iterator

from fastapi import APIRouter
from fastapi.responses import PlainTextResponse, Response
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from moevolve.search.server.dependencies import NEEDS_TOKEN, ServerDep
from moevolve.search.server.guard import HEALTH
from moevolve.search.server.problems import READS
from moevolve.store.reader import StoreReader
from moevolve.store.records import SEARCH_STATUSES

routes = APIRouter(responses=READS)


@routes.get(HEALTH, response_class=PlainTextResponse)
def healthz(server: ServerDep) -> str:
    """Answer `ok` if the store can be read."""
    server.store.controls()
    return "ok\n"


@routes.get(
    "/metrics",
    dependencies=[NEEDS_TOKEN],
    responses={200: {"content": {"text/plain": {}}, "description": "Prometheus' text format."}},
    response_class=Response,
)
def metrics(server: ServerDep) -> Response:
    """Return the metrics of the store's searches for Prometheus."""
    registry = CollectorRegistry()
    registry.register(_SearchCollector(server.store))
    return Response(generate_latest(registry), media_type="text/plain; version=0.0.4; charset=utf-8")


class _SearchCollector(Collector):
    """Counts of all searches of a store, and the progress of those that run."""

    def __init__(self, store: StoreReader) -> None:
        self._store = store

    def collect(self) -> Iterator[Metric]:
        searches, controls = self._store.searches(), self._store.controls()
        by_status = GaugeMetricFamily("moevolve_searches", "Searches by status.", labels=["status"])
        for status in SEARCH_STATUSES:
            by_status.add_metric([status], sum(row.search.status == status for row in searches))
        individuals = GaugeMetricFamily("moevolve_individuals", "Individuals.", labels=["search", "status"])
        best = _gauge("best_fitness", "Fitness of a search's best individual.")
        alive = _gauge("alive", "1 if a process runs the search, else 0.")
        total = _gauge("individuals_planned", "Individuals that the whole search will have.")
        rate = _gauge("evaluations_per_second", "Pace of a running search.")
        eta = _gauge("seconds_left", "Time left of a running search at its present pace.")
        for row in searches:
            name, control = row.search.name, controls.get(row.search.id)
            for label, count in {"ok": row.evaluated, "failed": row.failed, "pending": row.pending}.items():
                individuals.add_metric([name, label], count)
            if row.best_fitness is not None:
                best.add_metric([name], row.best_fitness)
            if control is None:  # its lease is lost
                continue
            alive.add_metric([name], control.alive)
            if control.progress is not None and control.alive:
                total.add_metric([name], control.progress.total)
                for family, value in ((rate, control.progress.rate), (eta, control.progress.left)):
                    if value is not None:
                        family.add_metric([name], value)
        yield from (by_status, individuals, best, alive, total, rate, eta)


def _gauge(name: str, description: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"moevolve_{name}", description, labels=["search"])
