"""The API agrees with its OpenAPI description."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import hypothesis
import pytest
import schemathesis
from hypothesis import HealthCheck, given
from schemathesis.specs.openapi.checks import positive_data_acceptance
from server_tokens import WRITE, write_runs

from moevolve.search.server.app import make_app
from moevolve.search.server.processes import Job, ProcessRunner
from moevolve.search.server.settings import ServerSettings
from moevolve.store.repository import Store

UNSAID = (
    *("POST /api/searches", "POST /api/searches/check", "POST /api/shrinks", "PUT /api/data/{name}"),
    "GET /api/pareto",
)
HEADERS = {"Authorization": f"Bearer {WRITE}", "X-Moevolve": "1"}


@pytest.fixture(scope="module")
def api(lab_store: Store, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The description of a served store, by which it can be called."""
    folder = tmp_path_factory.mktemp("served")
    settings = ServerSettings(
        configurations=(write_runs(folder),), exports=folder, logs=folder / "logs", hosts=("testserver",)
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MOEVOLVE_WRITE_TOKEN", WRITE)
        return schemathesis.openapi.from_asgi("/api/openapi.json", make_app(lab_store, settings), headers=HEADERS)


def test_every_response_is_declared(api: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def start_nothing(_: ProcessRunner, name: str, arguments: Any) -> Job:
        return Job(name, arguments[0], datetime.now(UTC), 1, True, None, " ".join(arguments))

    monkeypatch.setattr(ProcessRunner, "start", start_nothing)
    asked = []
    for found in api.exclude(path="/api/news").get_all_operations():  # which has no end
        operation = found.ok()

        @hypothesis.settings(max_examples=4, deadline=None, suppress_health_check=list(HealthCheck), database=None)
        @given(case=operation.as_strategy())
        def check(case: Any) -> None:
            # A schema can't say what a search may be launched with, nor that one of two query parameters is needed.
            unsaid = case.operation.label in UNSAID
            case.call_and_validate(headers=HEADERS, excluded_checks=[positive_data_acceptance] if unsaid else [])

        check()
        asked.append(operation.label)
    assert len(asked) > 25 and "POST /api/searches" in asked


def test_the_description_says_what_a_request_must_have(api: Any) -> None:
    """A client that knows nothing else can sign in and change something."""
    document = api.raw_schema
    scheme, paths = document["components"]["securitySchemes"], document["paths"]
    changes = [described for path, methods in paths.items() if "/api/" in path for described in methods.values()]
    for described in changes:
        ((name,),) = described["security"]
        assert (scheme[name]["type"], scheme[name]["scheme"]) == ("http", "bearer")
    for path in ("/api/searches", "/api/searches/{search}/pause", "/api/individuals/{ref}/export"):
        (header,) = (each for each in paths[path]["post"]["parameters"] if each["in"] == "header")
        assert (header["name"].lower(), header["required"], header["schema"]["const"]) == ("x-moevolve", True, "1")
    assert "security" not in paths["/healthz"]["get"], "which needs no token"
