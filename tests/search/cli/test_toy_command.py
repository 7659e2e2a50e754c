"""A new command is a record, a use case and a function that shows the answer: HTTP and Python follow."""

from __future__ import annotations

import contextlib
import io
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest
from server_tokens import WRITE
from starlette.testclient import TestClient
from store_samples import individual, search, split

import moevolve.search.cli
from moevolve._asking import asks
from moevolve.search.cli.app import COMMANDS, main, make_app
from moevolve.search.server.app import make_app as make_server
from moevolve.search.server.client import RemoteService
from moevolve.search.server.settings import ServerSettings
from moevolve.search.service.use_cases import USE_CASES, UseCase

TOY = '''
"""Everything that a new command takes: its record, its use case, and how its answer is shown."""

from __future__ import annotations

from dataclasses import KW_ONLY
from typing import Annotated

from pydantic import Field

import moevolve
from moevolve.search.cli.output.console import output, print_json
from moevolve.search.cli._requests import DEFAULT_STORE, JsonOption, StoreOption
from moevolve.search.cli._requests import takes
from moevolve.search.requests.record import Request, record
from moevolve.store.reader import StoreReader


@record
class CountRequest(Request["dict[str, int]"]):
    """Count the individuals of every search."""

    _: KW_ONLY
    least: Annotated[int, Field(ge=0, description="Leave out searches with fewer.")] = 0


def count(store: StoreReader, request: CountRequest) -> dict[str, int]:
    found = {row.search.name: row.individuals for row in store.searches()}
    return {name: count for name, count in found.items() if count >= request.least}


@takes(CountRequest)
def count_individuals(request: CountRequest, store: StoreOption = DEFAULT_STORE, as_json: JsonOption = False) -> None:
    found = moevolve.ask(store, request)
    if as_json:
        print_json(found)
    else:
        output.print(*(f"{name}: {count}" for name, count in found.items()))
'''

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The toy's file, where the commands are, and its use case in the list."""
    (tmp_path / "toy.py").write_text(TOY)
    monkeypatch.setattr(moevolve.search.cli, "__path__", [*moevolve.search.cli.__path__, str(tmp_path)])
    found = import_module("moevolve.search.cli.toy")
    monkeypatch.setitem(USE_CASES, found.CountRequest, UseCase("moevolve.search.cli.toy:count", "/counts"))
    yield found
    sys.modules.pop("moevolve.search.cli.toy", None)


@pytest.fixture
def run(toy: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Run:
    """The command line with one more command."""
    app = make_app(COMMANDS | {"count_individuals": "toy"})

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        out, err = io.StringIO(), io.StringIO()
        monkeypatch.setattr(sys, "argv", ["moevolve", *arguments])
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), pytest.raises(SystemExit) as end:
            main(app)
        return subprocess.CompletedProcess(list(arguments), int(end.value.code or 0), out.getvalue(), err.getvalue())

    return run


@pytest.fixture
def store(tmp_path: Path) -> str:
    """Of two searches, of one and of three individuals."""
    url = f"sqlite:///{tmp_path / 'toy.db'}"
    with moevolve.open_store(url, create=True) as opened:
        for name, count in (("one", 1), ("three", 3)):
            opened.create_search(search(name), [split()])
            opened.record(f"id-{name}", [individual(place) for place in range(count)])
    return url


def test_it_prints_tables_and_json_or_what_is_wrong_in_a_line(run: Run, store: str, tmp_path: Path) -> None:
    shown = run("count-individuals", "--store", store)
    assert (shown.returncode, shown.stdout, shown.stderr) == (0, "one: 1 three: 3\n", "")
    assert json.loads(run("count-individuals", "--least", "2", "--store", store, "--json").stdout) == {"three": 3}
    missing = run("count-individuals", "--store", f"sqlite:///{tmp_path / 'none.db'}")
    assert missing.returncode == 2 and "none.db" in missing.stderr and missing.stderr.count("\n") == 1
    assert run("count-individuals", "--least", "-1", "--store", store).returncode == 2


def test_help_lists_it(run: Run) -> None:
    shown = run("--help").stdout
    assert "count-individuals" in shown and "Count the individuals of every search" in shown
    assert all(name.partition(".")[0].replace("_", "-") in shown for name in COMMANDS)
    assert "Leave out searches with fewer." in run("count-individuals", "--help").stdout


def test_python_and_a_server_have_it_too(toy: ModuleType, store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert moevolve.ask(store, toy.CountRequest(least=2)) == {"three": 3}
    count = asks(toy.CountRequest)
    assert count(store, least=2) == {"three": 3}
    with pytest.raises(moevolve.UserError, match="least: "):
        count(store, least=-1)
    assert "Leave out searches with fewer." in str(count.__doc__)
    monkeypatch.setenv("MOEVOLVE_WRITE_TOKEN", WRITE)
    monkeypatch.setenv("MOEVOLVE_TOKEN", WRITE)
    with moevolve.open_store(store) as opened:
        app = make_server(opened, ServerSettings.model_validate({"store": store}))
        service = RemoteService("http://localhost:8080")
        monkeypatch.setattr(service, "_http", TestClient(app, service.url, headers=service._http.headers))
        assert service.ask(toy.CountRequest(least=2)) == {"three": 3}
        described = service._http.get("/api/openapi.json").json()["paths"]["/api/counts"]["get"]
    assert described["parameters"][0]["description"] == "Leave out searches with fewer."
