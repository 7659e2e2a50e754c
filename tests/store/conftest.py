"""A store per test, on every backend there is: SQLite always, PostgreSQL where MOEVOLVE_TEST_POSTGRES holds its URL."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import MetaData, create_engine, make_url

from moevolve.store.repository import Store

# The tests have no packages; this is how they share `store_samples`.
sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """URL of an empty database."""
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path / 'store.db'}"
        return
    given = os.environ.get("MOEVOLVE_TEST_POSTGRES")
    if not given:
        pytest.skip("MOEVOLVE_TEST_POSTGRES holds no URL")
    engine = create_engine(make_url(given).set(drivername="postgresql+psycopg"))
    tables = MetaData()
    tables.reflect(engine)
    tables.drop_all(engine)
    engine.dispose()
    yield given


@pytest.fixture
def store(url: str) -> Iterator[Store]:
    with Store.open(url) as opened:
        yield opened
