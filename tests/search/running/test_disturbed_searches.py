"""Searches on a real PostgreSQL whose connections are cut, whose server restarts, and which several processes want."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from disturbed_lab import LEASE_S, REFUSED, TOTAL, Drive, cut_connections, done, population, undisturbed, wait_for

from moevolve.store.reader import StoreReader
from moevolve.store.repository import Store

pytest.importorskip("psycopg")
from postgres_server import NoServerError, Server, running_server

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[object, ...]]:
    found = undisturbed(tmp_path_factory.mktemp("calm"))
    assert len(found) == TOTAL and any("failed" in row for row in found)
    return found


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """One that may be stopped, for these tests alone."""
    try:
        with running_server() as running:
            yield running
    except NoServerError as error:
        pytest.skip(str(error))


@pytest.fixture
def url(server: Server, request: pytest.FixtureRequest) -> str:
    """URL of a database of the test's own."""
    import psycopg

    name = f"test_{abs(hash(request.node.name))}"
    with psycopg.connect(server.url, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}")  # type: ignore[call-overload]
    return server.url_of(name)


def check_undisturbed(url: str, calm: object) -> None:
    assert population(url) == calm
    with StoreReader.open(url) as store:
        assert store.search("lab").status == "finished"


def test_a_driver_outlives_its_connections_and_its_database_as_long_as_its_lease_lasts(
    url: str, server: Server, calm: object, tmp_path: Path
) -> None:
    driver = Drive(url, tmp_path)
    for goal, number in ((10, signal.SIGINT), (20, signal.SIGQUIT)):  # one restart, and one crash
        wait_for(url, goal - 5, driver)
        cut_connections(url)
        wait_for(url, goal, driver)
        server.stop(number)
        time.sleep(LEASE_S / 3)
        server.start()
    wait_for(url, 25, driver)
    with StoreReader.open(url) as store:
        assert store.control("id-lab").epoch == 1, "it never lost its lease"
    server.stop()
    try:
        assert driver.end(60) == REFUSED, driver.said
    finally:
        server.start()
    assert 25 <= done(url) < TOTAL
    again = Drive(url, tmp_path)
    assert again.end() == 0, again.said
    check_undisturbed(url, calm)


def test_two_searches_are_driven_at_once_and_each_by_one_driver(url: str, calm: object, tmp_path: Path) -> None:
    expected = {"lab": calm, "two": undisturbed(tmp_path, "two")}
    first, other = (Drive(url, tmp_path, name) for name in expected)
    wait_for(url, 5, first)
    with Store.open(url) as store:
        store.ask("id-lab", "paused")
        second = Drive(url, tmp_path)
        assert second.end() == REFUSED
        assert f"search lab is being run by process {first.pid} on" in second.said and "Traceback" not in second.said
        store.ask("id-lab", "running")
    assert [driver.end() for driver in (first, other)] == [0, 0], (first.said, other.said)
    assert {name: population(url, name) for name in expected} == expected and calm != expected["two"]


def test_a_driver_killed_on_a_cluster_is_followed_by_another_one(
    ray_address: str, url: str, calm: object, tmp_path: Path
) -> None:
    """The cluster lives on, with what the first driver's workers are at."""
    first = Drive(url, tmp_path, address=ray_address)
    wait_for(url, 10, first)
    first.kill()
    assert 10 <= done(url) < TOTAL
    second = Drive(url, tmp_path, address=ray_address)
    assert second.end() == 0, second.said
    check_undisturbed(url, calm)
