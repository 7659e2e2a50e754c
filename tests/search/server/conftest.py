"""A served store with a finished search, and a client with a write token."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from search_lab import UnrulyPool, drive, run_config, start
from server_tokens import READ, WRITE
from starlette.testclient import TestClient
from store_samples import scored, search, split

from moevolve.search.server.app import make_app
from moevolve.search.server.processes import Job, ProcessRunner
from moevolve.search.server.settings import ServerSettings
from moevolve.store.repository import Store


def settings_in(folder: Path, **changes: Any) -> ServerSettings:
    tokens = folder / "tokens"
    tokens.write_text(f"# who may what\nread {READ}\n\nwrite {WRITE}\n")
    tokens.chmod(0o600)
    data = {"store": f"sqlite:///{folder / 'lab.db'}", "tokens": str(tokens), "logs": str(folder / "logs")}
    return ServerSettings.model_validate(data | changes)


@pytest.fixture
def settings(tmp_path: Path) -> Callable[..., ServerSettings]:
    """Makes settings of a server, by default with tokens."""
    return lambda **changes: settings_in(tmp_path, **changes)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Command lines of processes, which are recorded and not started."""
    commands: list[list[str]] = []

    def start(_: ProcessRunner, name: str, arguments: Sequence[str]) -> Job:
        commands.append(list(arguments))
        return Job(name, arguments[0], datetime.now(UTC), 7, True, None, "")

    monkeypatch.setattr(ProcessRunner, "start", start)
    return commands


@pytest.fixture(scope="session")
def lab_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of a store with the search `lab` of 60 individuals, and `alpha` of 5 that are ranked for the task `rte`.

    Not to be changed.
    """
    file = tmp_path_factory.mktemp("lab") / "lab.db"
    with Store.open(f"sqlite:///{file}") as store:
        drive(store, start(store, run_config()), UnrulyPool(seed=1))
        store.create_search(search("alpha"), [split()])
        for index, score in enumerate((0.5, 0.75, 0.25, None, 0.75)):
            scored(store, "id-alpha", index, score, parameters=1000 + index % 2)
    return file


@pytest.fixture(scope="module")
def lab_store(lab_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    """A copy of the lab's store for each file of tests, which may change it where that is in no other test's way."""
    file = tmp_path_factory.mktemp("copy") / "lab.db"
    shutil.copy(lab_file, file)
    with Store.open(f"sqlite:///{file}") as store:
        yield store


@pytest.fixture(scope="module")
def lab_app(lab_store: Store, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The application of that store, with tokens."""
    return make_app(lab_store, settings_in(tmp_path_factory.mktemp("served")))


@pytest.fixture(scope="module")
def client(lab_app: Any) -> Iterator[TestClient]:
    """A client with a write token."""
    headers = {"authorization": f"Bearer {WRITE}", "x-moevolve": "1"}
    with TestClient(lab_app, "http://localhost:8080", headers=headers) as found:
        yield found
