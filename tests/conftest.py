"""What the tests of several parts share: a PostgreSQL database, and a process without moevolve."""

from __future__ import annotations

import atexit
import gc
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from outsider import Outsider

# What is imported stays: collecting garbage among it, most of a million objects, was a twentieth of all the time.
gc.disable()
# The same modules are imported in process after process, and those of the tests rewritten: once is enough.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# Test processes and the programs they start share few cores: threads of torch's own would only be in each other's way.
# Read when torch is loaded, so before any test module is.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# No test needs the hub. A search whose model isn't there would wait for it, again and again.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# The same examples in every run: what a change breaks is its own fault, and a rare example isn't left to somebody else.
# A busy machine may slow down any test, so time decides nothing.
settings.register_profile("repeatable", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("repeatable")


def pytest_configure() -> None:
    """Let the programs that tests interrupt hear Ctrl-C: started in a script's background, this process ignores it, and
    they would inherit that."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # A process can't change over, and some tests start Ray in it, which asks for tokens if nobody says anything, while
    # others join a cluster of the tests' own.
    os.environ["RAY_AUTH_MODE"] = "disabled"
    # By default Ray's workers give way to everything else on the machine: to the other half of the tests.
    os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112 - Ray's spelling


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with slow tests first: handed out last, one of them would keep one process busy while others are done."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


def pytest_collection_finish() -> None:
    """Leave what was imported out of the garbage collections to come."""
    gc.freeze()
    gc.enable()
    # Some libraries complain of what is left at the end. Not earlier: pytest itself collects garbage when it ends.
    atexit.register(gc.unfreeze)


@pytest.fixture(scope="session")
def postgres() -> Iterator[str]:
    """URL of a PostgreSQL database that tests may empty: MOEVOLVE_TEST_POSTGRES, or that of a server of their own."""
    given = os.environ.get("MOEVOLVE_TEST_POSTGRES")
    if given:
        yield given
        return
    pytest.importorskip("psycopg")
    from postgres_server import NoServerError, running_server

    with ExitStack() as stack:
        try:
            url = stack.enter_context(running_server()).url
        except NoServerError as error:
            pytest.skip(str(error))
        yield url


@pytest.fixture
def empty_postgres(postgres: str) -> str:
    """The URL of `postgres`, all tables of which are dropped."""
    import psycopg

    with psycopg.connect(postgres, autocommit=True) as connection:
        if tables := tables_of(connection):
            connection.execute(f"DROP TABLE {tables} CASCADE")
    return postgres


@pytest.fixture
def fresh_postgres(postgres: str) -> str:
    """The URL of `postgres`, whose tables are those of a store and empty, or dropped: sooner there than new ones."""
    import psycopg

    from moevolve.store.schema import newest_revision

    with psycopg.connect(postgres, autocommit=True) as connection:
        if tables := tables_of(connection):
            stored = "alembic_version" in tables and connection.execute("TABLE alembic_version").fetchall()
            if stored == [(newest_revision(),)]:
                others = tables_of(connection, but="alembic_version")
                connection.execute(f"TRUNCATE {others} RESTART IDENTITY CASCADE")
            else:
                connection.execute(f"DROP TABLE {tables} CASCADE")
    return postgres


def tables_of(connection: Any, but: str = "") -> str:
    query = "SELECT string_agg(quote_ident(tablename), ', ') FROM pg_tables WHERE schemaname = 'public'"
    return connection.execute(f"{query} AND tablename <> %s", [but]).fetchone()[0] or ""


@pytest.fixture(scope="session")
def outside(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Outsider]:
    with Outsider(tmp_path_factory.mktemp("hf")) as process:
        yield process


@pytest.fixture
def outsider(outside: Outsider, tmp_path: Path) -> Callable[..., list[Any]]:
    """Logits, greedy tokens and module of exported checkpoints, from a process that can't import moevolve."""

    def ask(directories: list[Path], tokens: Any, *prompts: str) -> list[Any]:
        return outside.load(directories, tokens.tolist(), prompts or ("the quick brown",), tmp_path / "modules")

    return ask
