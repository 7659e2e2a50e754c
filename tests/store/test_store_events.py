"""Events: what happened to searches, numbered in the order of commits, on every backend."""

from __future__ import annotations

import getpass
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest
from store_samples import decided, individual, search, split

from moevolve.store.errors import StoreError
from moevolve.store.records import Control, ExportRecord, Progress
from moevolve.store.repository import Store

PROGRESS = Progress(12, 40, "prune", (7, 0.75), 0.9, 1, 2, 10, 3.5, 8.0)


@pytest.fixture
def alpha(store: Store) -> str:
    store.create_search(search(), [split()])
    return "id-alpha"


def told(store: Store, search_id: str, after: int = 0) -> list[tuple[int, str, str, int | None]]:
    return [(one.seq, one.kind, one.text, one.index) for one in store.events({search_id: after})]


def test_everything_that_happens_is_told_once_and_in_order(store: Store, alpha: str) -> None:
    lease = store.acquire(alpha, "driver", 60)
    store.set_status(lease, "running")
    store.ask(alpha, workers=3)
    store.record(lease, [individual(0), individual(1), individual(2)])
    store.record(lease, [decided(individual(0), 0.5), decided(individual(1), 0.25)])
    store.record(lease, [decided(individual(2), 0.5)])  # ties go to the earlier one
    failed = individual(3, status="failed", failure="NaN", failure_kind="candidate")
    store.record(lease, [failed, decided(individual(4), 0.75)])
    store.record(lease, [failed])
    store.add_export("alpha:4", ExportRecord("/tmp/out", "stock", "{}"))
    store.set_status(lease, "failed", "PoolError: no room")
    by = f"by {getpass.getuser()} on {socket.gethostname()}"
    expected = [
        (1, "status", "running", None),
        (2, "asked", f"workers: 3, {by}", None),
        (3, "best", "individual 0: 50.0 %", 0),
        (4, "failed", "individual 3: NaN", 3),
        (5, "best", "individual 4: 75.0 %", 4),
        (6, "exported", f"individual 4 to /tmp/out, {by}", 4),
        (7, "status", "failed: PoolError: no room", None),
    ]
    assert told(store, alpha) == expected
    assert told(store, alpha, after=5) == expected[5:] and store.control(alpha).events == 7
    assert [one.seq for one in store.events({alpha: 2}, limit=2)] == [3, 4]
    assert [one.seq for one in store.latest_events(alpha, limit=2)] == [7, 6]


def test_events_of_several_searches_come_together(store: Store, alpha: str) -> None:
    store.create_search(search("beta"), [split()])
    for search_id in (alpha, "id-beta", alpha):
        store.set_status(search_id, "running")
    assert [(one.search_id, one.seq) for one in store.events({alpha: 0, "id-beta": 0})] == [
        (alpha, 1),
        ("id-beta", 1),
        (alpha, 2),
    ]
    assert [one.search_id for one in store.latest_events(limit=2)] == [alpha, "id-beta"]
    assert {key: control.events for key, control in store.controls().items()} == {alpha: 2, "id-beta": 1}


def test_many_writers_and_writes_that_fail_leave_no_gap_in_the_numbers(store: Store, alpha: str) -> None:
    with pytest.raises(StoreError):
        store.record(alpha, [decided(individual(0), 0.5), individual(2, parents=[9])])
    assert told(store, alpha) == [] and store.control(alpha).events == 0
    store.acquire(alpha, "driver", 60)
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda number: store.ask(alpha, workers=number), range(1, 13)))
    assert [one.seq for one in store.events({alpha: 0})] == list(range(1, 13))


def test_a_driver_says_where_it_stands(store: Store, alpha: str) -> None:
    lease = store.acquire(alpha, "driver", 60)
    assert store.control(alpha) == Control("driver", 1, True, "running", None)
    store.renew(lease, 60, "calibrating", PROGRESS)
    store.renew(lease, 60)
    control = store.control(alpha)
    assert (control.stage, control.progress) == ("calibrating", PROGRESS)
    store.release(lease)
    again = store.acquire(alpha, "next", 60)
    control = store.renew(again, 60)
    assert (control.stage, control.progress) == (None, PROGRESS)
