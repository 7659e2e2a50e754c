"""A store per test, on every backend there is: SQLite always, PostgreSQL where a server can be had."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from moevolve.store.repository import Store


@pytest.fixture(params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """URL of an empty database."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'store.db'}"
    return str(request.getfixturevalue("empty_postgres"))


@pytest.fixture
def store(url: str) -> Iterator[Store]:
    with Store.open(url) as opened:
        yield opened
