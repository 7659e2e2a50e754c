"""Several processes on one store, and processes that die in the middle of a write."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

import pytest
from sqlalchemy import Insert, Update, insert, update
from store_samples import ENGINE, MODEL, digest, individual, locked, search, split
from store_writers import Writer
from waiting import PATIENT_S

from moevolve.store.errors import NameTakenError, StoreError
from moevolve.store.repository import Store
from moevolve.store.session import transaction
from moevolve.store.tables import calibrations, searches
from moevolve.store.upkeep.check import check
from moevolve.store.writes import utc_now


def test_readers_and_writers_share_a_store(store: Store) -> None:
    for name in ("alpha", "beta"):
        store.create_search(search(name), [split()])
    writers = [Writer(store.url, "id-alpha"), Writer(store.url, "id-beta")]
    seen = [0, 0]
    try:
        until = time.monotonic() + PATIENT_S
        while min(seen) < 60 and time.monotonic() < until:
            rows = [store.history(name) for name in ("id-alpha", "id-beta")]
            # Whole transactions only, and never less than before.
            assert all(len(some) % 20 == 0 and all(row.status == "ok" for row in some) for some in rows)
            assert all(len(some) >= before for some, before in zip(rows, seen, strict=True))
            seen = [len(some) for some in rows]
            if sum(seen):
                # The writers go on meanwhile, so the ranking may know more, never less.
                known = max(row.fitness for some in rows for row in some)
                assert store.best("rte", by="search", limit=3)[0].score >= known
            assert all(one.running for one in writers)
    finally:
        said = [one.kill() for one in writers]
    assert min(seen) >= 60
    assert [len(store.history(name)) >= count for name, count in zip(("id-alpha", "id-beta"), said, strict=True)] == [
        True
    ] * 2


def test_a_killed_writer_leaves_whole_transactions(store: Store) -> None:
    store.create_search(search(), [split()])
    committed = 0
    for delay in (0.0, 0.05):
        writer = Writer(store.url, "id-alpha")
        writer.wait()
        time.sleep(delay)
        said = writer.kill()
        rows = store.history("id-alpha")
        assert len(rows) >= max(committed + 20, said)
        assert len(rows) % 20 == 0
        assert [row.index for row in rows] == list(range(len(rows)))
        assert all(row.parents == ((row.index - 1, row.index // 2) if row.index else ()) for row in rows)
        assert all(row.status == "ok" for row in rows)
        hashes = [row.phenotype_hash for row in rows]
        assert len(store.evaluations(hashes, MODEL, ENGINE, [digest("rte", "search")])) == len(rows)
        assert check(store).problems == ()
        committed = len(rows)


def test_a_waiting_writer_gets_its_turn(store: Store) -> None:
    """A second writer waits for the first in place of failing, also when it has read before it writes."""
    store.create_search(search(), [split()])
    first = update(searches).values(status="running")
    while_another_does(store, first, lambda: store.record("id-alpha", [individual(0)]))
    assert len(store.history("id-alpha")) == 1


def while_another_does(store: Store, statement: Insert | Update, write: Callable[[], object]) -> None:
    """Writes something after another connection has, and before that one commits."""
    with Store.open(store.url) as other, ThreadPoolExecutor(1) as thread:
        with transaction(other._engine, write=True) as connection:
            connection.execute(statement)
            done = thread.submit(write)
            time.sleep(0.2)
            assert not done.done()
        done.result(PATIENT_S)


def test_of_two_that_make_one_thing_the_first_stays(store: Store) -> None:
    first = insert(calibrations).values(fingerprint="a" * 64, content=b"first", created_at=utc_now())
    while_another_does(store, first, lambda: store.add_calibration("a" * 64, b"second"))
    assert store.calibration("a" * 64) == b"first"

    def create() -> None:
        with pytest.raises(NameTakenError, match=r"'alpha' \(id id-alpha\) exists already"):
            store.create_search(search(id="id-2"), [split()])

    first = insert(searches).values(**asdict(search()) | {"created_at": utc_now(), "updated_at": utc_now()})
    while_another_does(store, first, create)
    assert [row.search.id for row in store.searches()] == ["id-alpha"]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A SQLite store with a search."""
    path = tmp_path / "store.db"
    with Store.open(f"sqlite:///{path}") as store:
        store.create_search(search(), [split()])
    return path


def test_a_file_that_is_opened_twice_keeps_its_log(file: Path) -> None:
    """A process that took itself for the last one would delete the log that another still reads."""
    url = f"sqlite:///{file}"
    ends = f"from moevolve.store.repository import Store; s = Store.open('{url}'); s.searches(); s.close()"
    with Store.open(url) as first:
        assert len(first.searches()) == 1
        Store.open(url).close()
        subprocess.run([sys.executable, "-c", ends], check=True)
        with Store.open(url) as second:
            second.create_search(search("beta"), [split()])
            assert len(first.searches()) == 2


def test_a_locked_file_is_waited_for_as_long_as_is_said(file: Path) -> None:
    with Store.open(f"sqlite:///{file}") as store, ThreadPoolExecutor(1) as thread:
        with locked(file):
            done = thread.submit(store.record, "id-alpha", [individual(0)])
            time.sleep(0.7)
            assert not done.done()
        done.result(30)
        store.retry_timeout_s = 600
        with locked(file):
            done = thread.submit(store.record, "id-alpha", [individual(1)])
            time.sleep(0.2)
            store.retry_timeout_s = 0.5
            with pytest.raises(StoreError, match=r"store\.db: database is locked"):
                done.result(30)
        assert len(store.history("id-alpha")) == 1


def test_ctrl_c_is_heard_while_a_file_is_locked(file: Path) -> None:
    with Store.open(f"sqlite:///{file}") as store:
        store.retry_timeout_s = 600
        main = threading.main_thread().ident
        assert main is not None
        press = threading.Timer(0.2, signal.pthread_kill, (main, signal.SIGINT))
        with locked(file):
            press.start()
            with pytest.raises(KeyboardInterrupt):
                store.record("id-alpha", [individual(0)])
        store.record("id-alpha", [individual(1)])
        assert [row.index for row in store.history("id-alpha")] == [1]
