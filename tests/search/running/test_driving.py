"""Holding a search: the lease is renewed while the driver works, and its loss is noticed."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from store_samples import locked, search
from waiting import PATIENT_S

from moevolve.search.running.driving import Driving, held, is_gone, this_process
from moevolve.store.errors import LeaseHeldError, LeaseLostError, StoreError
from moevolve.store.repository import Store


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(f"sqlite:///{tmp_path / 'store.db'}") as opened:
        opened.create_search(search(), [])
        yield opened


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENT_S
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_it_is_held_for_as_long_as_it_takes(store: Store) -> None:
    with Driving(store, "id-alpha", 0.3) as driving:
        time.sleep(0.7)
        assert store.control("id-alpha").alive and driving.control.alive
        assert store.control("id-alpha").owner == this_process()
        with pytest.raises(LeaseHeldError, match=f"process {os.getpid()}"), Driving(store, "id-alpha", 0.3):
            pass
        store.ask("id-alpha", "paused", 3)
        until(lambda: driving.control.wanted == "paused" and driving.control.workers == 3)
    assert not store.control("id-alpha").alive
    with Driving(store, "id-alpha", 0.3) as again:
        assert (again.lease.epoch, again.control.wanted) == (2, "running")


def test_its_loss_is_noticed(store: Store) -> None:
    with Driving(store, "id-alpha", 0.3) as driving:
        store.acquire("id-alpha", "another", 60, lambda _: True)

        def lost() -> bool:
            try:
                return not driving.control
            except LeaseLostError:
                return True

        until(lost)
    assert store.control("id-alpha").owner == "another", "it is not the loser's to give back"


def test_a_store_that_is_away_for_a_while_is_waited_for(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    renew, calls = store.renew, list[float]()

    def unreachable(*args: object) -> object:
        calls.append(time.monotonic())
        raise StoreError("the server is starting up")

    with Driving(store, "id-alpha", 0.6) as driving:
        monkeypatch.setattr(store, "renew", unreachable)
        until(lambda: len(calls) > 1)
        monkeypatch.setattr(store, "renew", renew)
        assert driving.control.alive
        monkeypatch.setattr(store, "renew", unreachable)
        with pytest.raises(StoreError, match="starting up"):
            until(lambda: not driving.control)


def test_processes_of_this_machine_are_known_to_be_gone() -> None:
    mine = this_process()
    assert not is_gone(mine)
    with subprocess.Popen([sys.executable, "-c", "pass"], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.read()
        # It has ended, or will in a moment; nobody has waited for it yet.
        until(lambda: is_gone(mine.replace(f" {os.getpid()} ", f" {child.pid} ")))
    ended = mine.replace(f" {os.getpid()} ", f" {child.pid} ")
    assert is_gone(ended)
    machine, numbering = ended.rpartition(" (")[2].rstrip(")").split(", ")
    for elsewhere in (ended.replace(machine, "0"), ended.replace(numbering, "0"), "somebody else"):
        assert not is_gone(elsewhere), "a copy of this machine, or a container on it, has other processes"


def test_who_drives_in_a_container_is_not_taken_for_gone() -> None:
    code = "import sys, moevolve.search.running.driving as d; print(d.is_gone(sys.argv[1]))"
    asked = [sys.executable, "-c", code, this_process()]
    done = subprocess.run(["unshare", "--pid", "--fork", *asked], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"processes can't be set apart here: {done.stderr.strip()}")
    assert done.stdout == "False\n"


def test_a_sqlite_store_is_one_machines(store: Store) -> None:
    store.create_search(search("beta"), [])
    there = store.acquire("id-alpha", "process 7 on elsewhere (0, 0)", 60)
    for name in ("id-alpha", "id-beta"):
        with pytest.raises(StoreError, match=r"alpha .* process 7 on elsewhere .* use PostgreSQL"), held(store, name):
            pass
        with pytest.raises(StoreError, match="use PostgreSQL"), Driving(store, name, 0.3):
            pass
    store.release(there)
    with held(store, "id-alpha"), held(store, "id-beta"):
        pass


def test_a_locked_file_is_waited_for_longer_than_the_lease_lasts(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever has it locked keeps everybody from the lease, too; but not for ever."""
    store.patience_s = 0.1
    with Driving(store, "id-alpha", 0.3) as driving:
        with locked(tmp_path / "store.db"):
            time.sleep(1.5)
        store.set_status(driving.lease, "running")
        until(lambda: store.control("id-alpha").alive)
        assert driving.control.alive
    assert store.patience_s == 0.1 and store.control("id-alpha").epoch == 1
    monkeypatch.setattr("moevolve.search.running.driving._LOCKED_S", 0.6)
    with (
        Driving(store, "id-alpha", 0.3) as driving,
        locked(tmp_path / "store.db"),
        pytest.raises(StoreError, match="database is locked"),
    ):
        until(lambda: not driving.control)
