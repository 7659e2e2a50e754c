"""Holding a search: the lease is renewed while the driver works, and its loss is noticed."""

from __future__ import annotations

import os
import threading
import time
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta, tzinfo
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select
from store_samples import locked, search
from waiting import PATIENT_S, until

from moevolve.search.running.lease_heartbeat import LeaseHeartbeat, brief_lease
from moevolve.store.errors import LeaseHeldError, LeaseLostError, StoreError
from moevolve.store.leases import this_process
from moevolve.store.repository import Store
from moevolve.store.tables import leases


@pytest.fixture
def store(store: Store) -> Store:
    store.create_search(search(), [])
    return store


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moevolve.search.running.lease_heartbeat._BEAT_S", 0.1)


LEASE_S = PATIENT_S
"""So that a machine that stands still for a while loses no lease; one that is to run out is shorter."""


def test_it_is_held_for_as_long_as_it_takes(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    renew, calls = store.renew, list[float]()

    def renewed(lease: Any, seconds: float, *others: Any) -> Any:
        calls.append(seconds)
        return renew(lease, seconds, *others)

    monkeypatch.setattr(store, "renew", renewed)
    with LeaseHeartbeat(store, "id-alpha", LEASE_S) as driving:
        until(lambda: len(calls) > 1)
        assert set(calls) == {LEASE_S}, "each time for as long again"
        assert store.control("id-alpha").alive and driving.control.alive
        assert store.control("id-alpha").owner == this_process()
        with pytest.raises(LeaseHeldError, match=f"process {os.getpid()}"), LeaseHeartbeat(store, "id-alpha", LEASE_S):
            pass
        store.ask("id-alpha", "paused", 3)
        until(lambda: driving.control.desired_state == "paused" and driving.control.workers == 3)
    assert not store.control("id-alpha").alive
    with LeaseHeartbeat(store, "id-alpha", LEASE_S) as again:
        assert (again.lease.epoch, again.control.desired_state) == (2, "running")


def test_a_clock_that_jumps_costs_no_driver_its_search(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    ahead = timedelta()

    class JumpingClock(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> datetime:  # type: ignore[override]
            return datetime.now(tz) + ahead

    for module in ("leases", "events", "writes"):
        monkeypatch.setattr(f"moevolve.store.{module}.datetime", JumpingClock)
    with LeaseHeartbeat(store, "id-alpha", LEASE_S) as driving:
        for days in (1, -1, 0):
            ahead = timedelta(days=days)
            until(lambda: abs(expiry(store) - JumpingClock.now(UTC)) < timedelta(seconds=2 * LEASE_S))
            with pytest.raises(LeaseHeldError), brief_lease(store, "id-alpha"):
                pass
            store.set_status(driving.lease, "running", f"{days} days ahead")
            store.ask("id-alpha", workers=days + 2)
            until(lambda asked=days + 2: driving.control.workers == asked)
        assert driving.control.epoch == 1
    assert not store.control("id-alpha").alive
    happened = store.events({"id-alpha": 0})
    assert [one.seq for one in happened] == sorted(one.seq for one in happened), "as they happened"


def expiry(store: Store) -> datetime:
    with store.transaction() as connection:
        (found,) = connection.execute(select(leases.c.expires_at)).scalars()
    assert isinstance(found, datetime)
    return found


def test_its_loss_is_noticed(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    with LeaseHeartbeat(store, "id-alpha", LEASE_S) as driving:
        with monkeypatch.context() as patch:
            patch.setattr("moevolve.store.leases.is_gone", lambda _: True)
            store.acquire("id-alpha", "another", 60)

        def lost() -> bool:
            try:
                return not driving.control
            except LeaseLostError:
                return True

        until(lost)
    assert store.control("id-alpha").owner == "another", "it is not the loser's to give back"


def test_a_store_that_is_away_is_waited_for_as_long_as_the_lease_lasts(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    renew, calls = store.renew, list[float]()

    def unreachable(*args: object) -> object:
        calls.append(time.monotonic())
        raise StoreError("the server is starting up")

    with LeaseHeartbeat(store, "id-alpha", LEASE_S) as driving:
        monkeypatch.setattr(store, "renew", unreachable)
        until(lambda: len(calls) > 1)
        monkeypatch.setattr(store, "renew", renew)
        assert driving.control.alive
    with LeaseHeartbeat(store, "id-alpha", 0.6) as driving:
        monkeypatch.setattr(store, "renew", unreachable)
        with pytest.raises(StoreError, match="starting up"):
            until(lambda: not driving.control)


def test_a_sqlite_store_is_one_machines(store: Store) -> None:
    store.create_search(search("beta"), [])
    there = store.acquire("id-alpha", "process 7 on elsewhere (0, 0)", 60)
    for name in ("id-alpha", "id-beta"):
        with (
            pytest.raises(StoreError, match=r"alpha .* process 7 on elsewhere .* use PostgreSQL"),
            brief_lease(store, name),
        ):
            pass
        with pytest.raises(StoreError, match="use PostgreSQL"), LeaseHeartbeat(store, name, 0.3):
            pass
    store.release(there)
    with brief_lease(store, "id-alpha"), brief_lease(store, "id-beta"):
        pass


def test_a_locked_file_is_waited_for_longer_than_the_lease_lasts(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever has it locked keeps everybody from the lease, too; but not for ever."""
    store.retry_timeout_s = 0.1
    with LeaseHeartbeat(store, "id-alpha", 0.3) as driving, ExitStack() as held:
        held.enter_context(locked(tmp_path / "store.db"))
        threading.Timer(1.0, held.close).start()
        store.set_status(driving.lease, "running")
        until(lambda: store.control("id-alpha").alive)
        assert driving.control.epoch == 1
    assert store.retry_timeout_s == 0.1 and store.control("id-alpha").epoch == 1
    monkeypatch.setattr("moevolve.search.running.lease_heartbeat._LOCKED_S", 0.6)
    with (
        LeaseHeartbeat(store, "id-alpha", 0.3) as driving,
        locked(tmp_path / "store.db"),
        pytest.raises(StoreError, match="database is locked"),
    ):
        until(lambda: not driving.control)
