"""The API agrees with its OpenAPI description."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis.specs.openapi.checks import positive_data_acceptance
from search_lab import UnrulyPool, drive, run_config, start
from server_tokens import WRITE
from store_samples import scored, search, split

from moevolve.search.server.app import make_app
from moevolve.search.server.processes import Job, ProcessRunner
from moevolve.search.server.settings import ServerSettings
from moevolve.store.repository import Store

HEADERS = {"authorization": f"Bearer {WRITE}", "x-moevolve": "1"}


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A served store whose processes are not started."""

    def start_nothing(_: ProcessRunner, name: str, arguments: Any) -> Job:
        return Job(name, arguments[0], datetime.now(UTC), 1, True, None, " ".join(arguments))

    folder = tmp_path_factory.mktemp("served")
    (folder / "runs").mkdir()
    served = ServerSettings.model_validate(
        {
            "configurations": [str(folder / "runs")],
            "exports": str(folder),
            "logs": str(folder / "logs"),
            "hosts": ["testserver"],
        }
    )
    with pytest.MonkeyPatch.context() as patch, Store.open(f"sqlite:///{folder / 'lab.db'}") as store:
        patch.setattr(ProcessRunner, "start", start_nothing)
        patch.setenv("MOEVOLVE_WRITE_TOKEN", WRITE)
        drive(store, start(store, run_config()), UnrulyPool(seed=1))
        store.create_search(search("alpha"), [split()])
        scored(store, "id-alpha", 0, 0.5)
        yield schemathesis.openapi.from_asgi("/api/openapi.json", make_app(store, served), headers=HEADERS)


def test_every_response_is_declared(api: Any) -> None:
    asked = []
    for found in api.exclude(path="/api/news").get_all_operations():  # which has no end
        operation = found.ok()

        @settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck), database=None)
        @given(case=operation.as_strategy())
        def check(case: Any) -> None:
            # What a search may be launched with, a schema can't say whole.
            launches = case.operation.label in ("POST /api/searches", "POST /api/searches/check")
            case.call_and_validate(headers=HEADERS, excluded_checks=[positive_data_acceptance] if launches else [])

        check()
        asked.append(operation.label)
    assert len(asked) > 25 and "POST /api/searches" in asked
