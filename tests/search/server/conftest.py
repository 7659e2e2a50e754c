"""A served store with a finished search, and a client with a write token."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from search_lab import UnrulyPool, drive, run_config, start
from server_tokens import READ, WRITE
from starlette.testclient import TestClient
from store_samples import scored, search, split

from moevolve.search.server.app import make_app
from moevolve.search.server.settings import ServerSettings
from moevolve.store.repository import Store


@pytest.fixture
def settings(tmp_path: Path) -> Callable[..., ServerSettings]:
    """Makes settings of a server, by default with tokens."""

    def make(**changes: Any) -> ServerSettings:
        tokens = tmp_path / "tokens"
        tokens.write_text(f"# who may what\nread {READ}\n\nwrite {WRITE}\n")
        tokens.chmod(0o600)
        data = {"store": f"sqlite:///{tmp_path / 'lab.db'}", "tokens": str(tokens), "logs": str(tmp_path / "logs")}
        return ServerSettings.model_validate(data | changes)

    return make


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


@pytest.fixture
def lab_store(lab_file: Path, tmp_path: Path) -> Iterator[Store]:
    """A copy of the lab's store, which may be changed."""
    shutil.copy(lab_file, tmp_path / "lab.db")
    with Store.open(f"sqlite:///{tmp_path / 'lab.db'}") as store:
        yield store


@pytest.fixture
def client(lab_store: Store, settings: Callable[..., ServerSettings]) -> Iterator[TestClient]:
    """A client with a write token."""
    headers = {"authorization": f"Bearer {WRITE}", "x-moevolve": "1"}
    with TestClient(make_app(lab_store, settings()), "http://localhost:8080", headers=headers) as found:
        yield found
