"""A new verb is a request, a function that prints its answer, and their lines in two lists."""

from __future__ import annotations

import json
import sys
from dataclasses import KW_ONLY
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import pytest
from server_tokens import WRITE
from starlette.testclient import TestClient
from store_samples import individual, search, split

import moevolve
from moevolve._asking import function_of
from moevolve.search.cli._requests import shows
from moevolve.search.cli.app import COMMANDS, main, make_app
from moevolve.search.cli.output.console import output
from moevolve.search.interface.request import Request, about, record
from moevolve.search.server.api import requests as routes
from moevolve.search.server.app import make_app as make_server
from moevolve.search.server.settings import ServerSettings
from moevolve.store.reader import StoreReader


# A file of `search/interface`.
@record
class CountIndividualsRequest(Request):
    """Count the individuals of every search.

    Raises:
        StoreError: there is no such store.
    """

    route = "/counts"
    _: KW_ONLY
    least: Annotated[int, about("Leave out searches with fewer.", ge=0)] = 0

    def answer(self, store: StoreReader) -> dict[str, int]:
        found = {row.search.name: row.individuals for row in store.searches()}
        return {name: count for name, count in found.items() if count >= self.least}


# A file of `search/cli`.
@shows(CountIndividualsRequest)
def count_individuals(found: dict[str, int], _: CountIndividualsRequest) -> None:
    output.print(*(f"{name}: {count}" for name, count in found.items()))


@pytest.fixture(autouse=True)
def toy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The lines in the lists of files with commands, and of what HTTP offers."""
    monkeypatch.setitem(sys.modules, "moevolve.search.cli.toy", sys.modules[__name__])
    monkeypatch.setattr(routes, "REQUESTS", (*routes.REQUESTS, CountIndividualsRequest))


@pytest.fixture
def run(in_process: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The command line with one more command."""
    monkeypatch.setattr("moevolve.search.cli.main", partial(main, make_app(COMMANDS | {"count_individuals": "toy"})))
    return in_process


@pytest.fixture
def store(tmp_path: Path) -> str:
    """Of two searches, of one and of three individuals."""
    url = f"sqlite:///{tmp_path / 'toy.db'}"
    with moevolve.open_store(url, create=True) as opened:
        for name, count in (("one", 1), ("three", 3)):
            opened.create_search(search(name), [split()])
            opened.record(f"id-{name}", [individual(place) for place in range(count)])
    return url


def test_it_prints_tables_and_json_or_what_is_wrong_in_a_line(run: Any, store: str, tmp_path: Path) -> None:
    shown = run("count-individuals", "--store", store)
    assert (shown.returncode, shown.stdout, shown.stderr) == (0, "one: 1 three: 3\n", "")
    assert json.loads(run("count-individuals", "--least", "2", "--store", store, "--json").stdout) == {"three": 3}
    missing = run("count-individuals", "--store", f"sqlite:///{tmp_path / 'none.db'}")
    assert missing.returncode == 2 and "none.db" in missing.stderr and missing.stderr.count("\n") == 1
    assert run("count-individuals", "--least", "-1", "--store", store).returncode == 2


def test_help_lists_it(run: Any) -> None:
    shown = run("--help").stdout
    assert "count-individuals" in shown and "Count the individuals of every search" in shown
    assert all(name.partition(".")[0].replace("_", "-") in shown for name in COMMANDS)
    assert "Leave out searches with fewer." in run("count-individuals", "--help").stdout


def test_python_and_a_server_have_it_too(store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert moevolve.ask(store, CountIndividualsRequest(least=2)) == {"three": 3}
    counted = function_of(CountIndividualsRequest)
    assert counted(store, least=2) == {"three": 3}
    with pytest.raises(moevolve.UserError, match="least: "):
        counted(store, least=-1)
    assert counted.__name__ == "count_individuals" and "Leave out searches with fewer." in str(counted.__doc__)
    monkeypatch.setenv("MOEVOLVE_WRITE_TOKEN", WRITE)
    with moevolve.open_store(store) as opened:
        app = make_server(opened, ServerSettings.model_validate({"store": store}))
        client = TestClient(app, "http://localhost", headers={"authorization": f"Bearer {WRITE}"})
        assert client.get("/api/counts?least=2").json() == {"three": 3}
        described = client.get("/api/openapi.json").json()["paths"]["/api/counts"]["get"]
    assert described["parameters"][0]["description"] == "Leave out searches with fewer."
