"""The API agrees with its OpenAPI description."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import hypothesis
import pytest
import schemathesis
from hypothesis import HealthCheck, given
from schemathesis.specs.openapi.checks import positive_data_acceptance
from search_lab import UnrulyPool, drive, run_config, start
from server_tokens import READ, WRITE, write_runs
from starlette.testclient import TestClient
from store_samples import scored, search, split

from moevolve.search.server.app import make_app
from moevolve.search.server.processes import Job, ProcessRunner
from moevolve.search.server.settings import ServerSettings
from moevolve.store.repository import Store

HEADERS = {"Authorization": f"Bearer {WRITE}", "X-Moevolve": "1"}


@dataclass(frozen=True)
class Served:
    app: Any
    store: Store


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A served store whose processes are not started."""

    def start_nothing(_: ProcessRunner, name: str, arguments: Any) -> Job:
        return Job(name, arguments[0], datetime.now(UTC), 1, True, None, " ".join(arguments))

    folder = tmp_path_factory.mktemp("served")
    runs = write_runs(folder)
    settings = ServerSettings.model_validate(
        {
            "configurations": [str(runs)],
            "exports": str(folder),
            "logs": str(folder / "logs"),
            "hosts": ["testserver"],
        }
    )
    with pytest.MonkeyPatch.context() as patch, Store.open(f"sqlite:///{folder / 'lab.db'}") as store:
        patch.setattr(ProcessRunner, "start", start_nothing)
        patch.setenv("MOEVOLVE_WRITE_TOKEN", WRITE)
        patch.setenv("MOEVOLVE_READ_TOKEN", READ)
        drive(store, start(store, run_config()), UnrulyPool(seed=1))
        store.create_search(search("alpha"), [split()])
        scored(store, "id-alpha", 0, 0.5)
        yield Served(make_app(store, settings), store)


def test_every_response_is_declared(served: Served) -> None:
    api = schemathesis.openapi.from_asgi("/api/openapi.json", served.app, headers=HEADERS)
    asked = []
    for found in api.exclude(path="/api/news").get_all_operations():  # which has no end
        operation = found.ok()

        @hypothesis.settings(max_examples=4, deadline=None, suppress_health_check=list(HealthCheck), database=None)
        @given(case=operation.as_strategy())
        def check(case: Any) -> None:
            # What a search may be launched with, a schema can't say whole.
            launches = case.operation.label in ("POST /api/searches", "POST /api/searches/check", "POST /api/shrinks")
            case.call_and_validate(headers=HEADERS, excluded_checks=[positive_data_acceptance] if launches else [])

        check()
        asked.append(operation.label)
    assert len(asked) > 25 and "POST /api/searches" in asked


class DescribedClient:
    """A client that knows of the API only what its OpenAPI document says."""

    def __init__(self, document: Any, http: TestClient, secret: str) -> None:
        self._document, self._http, self._secret = document, http, secret

    def call(self, operation: str, body: Any = None, **in_path: str) -> Any:
        """Call an operation by the name of its function; returns the status and the answer."""
        found = [
            (path, method, described)
            for path, methods in self._document["paths"].items()
            for method, described in methods.items()
            if described["operationId"].startswith(f"{operation}_api_")
        ]
        ((path, method, described),) = found
        headers = {}
        for scheme in (name for one in described.get("security", ()) for name in one):
            told = self._document["components"]["securitySchemes"][scheme]
            assert (told["type"], told["scheme"]) == ("http", "bearer")
            headers["Authorization"] = f"Bearer {self._secret}"
        for parameter in described.get("parameters", ()):
            if parameter["in"] == "header" and parameter["required"]:
                headers[parameter["name"]] = parameter["schema"]["const"]
        answer = self._http.request(method, path.format(**in_path), headers=headers, json=body)
        assert str(answer.status_code) in described["responses"]
        return answer.status_code, answer.json()


def test_a_client_of_the_description_alone_launches_and_pauses(served: Served) -> None:
    http = TestClient(served.app, "http://testserver")
    document = http.get("/api/openapi.json", headers=HEADERS).json()
    writer, reader = (DescribedClient(document, http, secret) for secret in (WRITE, READ))
    status, job = writer.call("launch", {"configuration": "small", "name": "described"})
    assert (status, job["name"]) == (202, "described")
    served.store.acquire("id-alpha", "driver", 600)
    assert reader.call("pause", search="alpha") == (403, {"detail": "this token may read only"})
    status, control = writer.call("pause", search="alpha")
    assert (status, control["desired_state"], control["alive"]) == (200, "paused", True)
    names = {row["search"]["name"] for row in reader.call("searches")[1]}
    assert names == {"lab", "alpha"}
    assert "security" not in document["paths"]["/healthz"]["get"], "which needs no token"
