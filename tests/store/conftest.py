"""A store per test, on every backend there is: SQLite always, PostgreSQL where a server can be had."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from moevolve.store.repository import Store


@pytest.fixture(params=["sqlite", "postgres"])
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def url(backend: str, request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """URL of an empty database."""
    if backend == "sqlite":
        return f"sqlite:///{tmp_path / 'store.db'}"
    return str(request.getfixturevalue("empty_postgres"))


@pytest.fixture(scope="session")
def empty_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A SQLite store without searches, to be copied: sooner done than its tables are made."""
    path = tmp_path_factory.mktemp("empty") / "store.db"
    Store.open(f"sqlite:///{path}").close()
    return path


@pytest.fixture
def store(backend: str, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    """A store without searches."""
    if backend == "sqlite":
        shutil.copy(request.getfixturevalue("empty_file"), tmp_path / "store.db")
        url = f"sqlite:///{tmp_path / 'store.db'}"
    else:
        url = str(request.getfixturevalue("fresh_postgres"))
    with Store.open(url) as opened:
        yield opened
