"""Monitoring: metrics, health check, logs."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient

from moevolve.store.records import Progress
from moevolve.store.repository import Store


def samples(client: TestClient) -> dict[tuple[str, ...], float]:
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(client.get("/metrics").text)
        for sample in family.samples
    }


def test_metrics_agree_with_the_store(client: TestClient, lab_store: Store) -> None:
    found = samples(client)
    lab = next(row for row in lab_store.searches() if row.search.name == "lab")
    assert found["moevolve_searches", "created"] == 2 and found["moevolve_searches", "running"] == 0
    assert found["moevolve_individuals", "lab", "ok"] == lab.evaluated > 40
    assert found["moevolve_individuals", "lab", "failed"] == lab.failed > 0
    assert found["moevolve_best_fitness", "alpha"] == 0.75 and found["moevolve_alive", "lab"] == 0
    assert ("moevolve_individuals_planned", "lab") not in found
    lease = lab_store.acquire("lab-1", "driver", 60)
    lab_store.renew(lease, 60, "evaluating", Progress(12, 40, "prune", (7, 0.75), 0.9, 1, 2, 10, 3.5, 8.0))
    found = samples(client)
    assert found["moevolve_alive", "lab"] == 1
    assert found["moevolve_individuals_planned", "lab"] == 40
    assert found["moevolve_evaluations_per_second", "lab"] == 3.5 and found["moevolve_seconds_left", "lab"] == 8


def test_the_health_check_needs_no_token_and_shows_nothing(client: TestClient) -> None:
    client = TestClient(client.app, "http://localhost:8080")
    assert (client.get("/healthz").text, client.get("/metrics").status_code) == ("ok\n", 401)
    probe = {"host": "10.1.2.3:8080", "x-forwarded-for": "10.1.2.4"}
    assert client.get("/healthz", headers=probe).text == "ok\n"
    head = client.head("/healthz", headers=probe)
    assert (head.status_code, head.text) == (200, "")
    assert client.get("/metrics", headers=probe).status_code == 400
