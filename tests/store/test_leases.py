"""Who may write to a search: leases and their epochs, on every backend."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from sqlalchemy import text
from store_samples import decided, digest, evaluation, gone_owner, individual, search, split
from waiting import until

from moevolve.store import leases
from moevolve.store.errors import LeaseHeldError, LeaseLostError, StoreError
from moevolve.store.leases import is_gone, is_on_another_machine, this_process
from moevolve.store.records import Lease
from moevolve.store.repository import Store
from moevolve.store.session import transaction

WRITES: tuple[Callable[[Store, Any], None], ...] = (
    lambda store, writer: store.record(writer, [individual(0)]),
    lambda store, writer: store.set_status(writer, "finished"),
    lambda store, writer: store.amend_search(writer, "{}", []),
)


@pytest.fixture
def alpha(store: Store) -> str:
    store.create_search(search(), [split()])
    return "id-alpha"


def written(store: Store) -> Any:
    found = store.search("alpha")
    return found.status, found.config, store.history("id-alpha")


def test_a_lease_is_one_drivers_until_it_runs_out_or_is_given_back(store: Store, alpha: str) -> None:
    assert not store.control(alpha).alive
    first = store.acquire(alpha, "first", 60)
    assert (first, store.control(alpha).owner) == (Lease(alpha, "first", 1), "first")
    with pytest.raises(LeaseHeldError, match=r"alpha is being run by first; .* free in (59|60) s"):
        store.acquire(alpha, "second", 60)
    store.release(first)
    assert (store.control(alpha).owner, store.control(alpha).alive) == (None, False)
    second = store.acquire(alpha, "second", 0)
    assert not store.control(alpha).alive
    # One that ran out and nobody took is its owner's still.
    store.record(second, [individual(0)])
    assert store.renew(second, 60).alive and store.control(alpha).alive
    store.renew(second, 0)
    assert store.acquire(alpha, gone_owner(), 60).epoch == 3 == second.epoch + 1
    # One whose owner is gone need not run out.
    assert not store.control(alpha).alive
    assert store.acquire(alpha, "fourth", 60).epoch == 4 and store.control(alpha).alive
    with pytest.raises(StoreError, match="no search"):
        store.acquire("id-gamma", "first", 60)


def test_who_lost_the_lease_writes_nothing(store: Store, alpha: str) -> None:
    late = store.acquire(alpha, "late", 0)
    now = store.acquire(alpha, "now", 60)
    before = written(store)
    for write in WRITES:
        with pytest.raises(LeaseLostError, match="lost search alpha to now"):
            write(store, late)
        with pytest.raises(LeaseLostError):
            store.renew(late, 60)
        store.release(late)
        assert written(store) == before and store.control(alpha).owner == "now"
    for write in WRITES:
        before = written(store)
        write(store, now)
        assert written(store) != before
    store.release(now)
    for write in WRITES:
        with pytest.raises(LeaseLostError, match=r"to now|to another one"):
            write(store, late)


def test_who_has_no_lease_writes_only_where_nobody_has(store: Store, alpha: str) -> None:
    lease, before = store.acquire(alpha, "driver", 60), written(store)
    for write in WRITES:
        with pytest.raises(LeaseHeldError, match="alpha is being run by driver: stop it first"):
            write(store, alpha)
        assert written(store) == before
    # Evaluations belong to no search.
    store.add_evaluations([evaluation(0, 0.5)])
    store.release(lease)
    for write in WRITES:
        before = written(store)
        write(store, alpha)
        assert written(store) != before


def test_what_is_asked_is_heard_until_the_next_driver(store: Store, alpha: str) -> None:
    with pytest.raises(StoreError, match=r"alpha isn't being run \(it is created\)"):
        store.ask(alpha, "paused")
    lease = store.acquire(alpha, "driver", 60)
    assert store.renew(lease, 60).desired_state == "running"
    store.ask(alpha, "paused")
    store.ask(alpha, workers=3)
    control = store.renew(lease, 60)
    assert (control.desired_state, control.workers) == ("paused", 3)
    store.release(lease)
    lease = store.acquire(alpha, "next", 60)
    assert (store.control(alpha).desired_state, store.control(alpha).workers) == ("running", None)
    # That it is to be cancelled is left to the next driver, unless it came to its end before that was heard.
    store.ask(alpha, "cancelled", workers=3)
    store.release(lease)
    lease = store.acquire(alpha, "third", 60)
    assert (store.control(alpha).desired_state, store.control(alpha).workers) == ("cancelled", None)
    store.set_status(lease, "finished")
    store.release(lease)
    store.acquire(alpha, "last", 60)
    assert store.control(alpha).desired_state == "running"


def test_of_many_that_ask_at_once_one_gets_it(store: Store, alpha: str) -> None:
    def attempt(number: int) -> Lease | None:
        try:
            return store.acquire(alpha, f"driver {number}", 60)
        except LeaseHeldError:
            return None

    with ThreadPoolExecutor(4) as threads:
        won = [lease for lease in threads.map(attempt, range(8)) if lease is not None]
    assert [lease.epoch for lease in won] == [1]


def test_of_two_that_think_they_have_it_one_writes(store: Store, alpha: str) -> None:
    """Each writes as fast as it can, and takes the lease over when it is lost: every index is one driver's."""
    done: dict[int, list[int]] = {}
    refused: list[str] = []

    def drive(number: int) -> None:
        done[number] = []
        lease = store.acquire(alpha, f"driver {number}", 0.0)
        for _ in range(25):
            index = len(store.history(alpha))
            try:
                own = individual(index, content_hash=digest(index, number), phenotype=(index, number))
                store.record(lease, [decided(own, 0.5)])
                done[number].append(index)
            except LeaseLostError:
                lease = store.acquire(alpha, f"driver {number}", 0.0)
            except StoreError as error:
                # It had read before the other wrote.
                refused.append(str(error))

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(drive, (1, 2)))
    history = store.history(alpha)
    assert sorted(done[1] + done[2]) == [row.index for row in history] == list(range(len(history)))
    assert all("already recorded with another genome" in reason for reason in refused)
    assert all(history[i].content_hash == digest(i, number) for number, own in done.items() for i in own)


def test_which_searches_are_run_by_whom_is_known(store: Store, alpha: str) -> None:
    for name in ("beta", "gamma", "delta"):
        store.create_search(search(name), [])
    for name in ("alpha", "beta", "gamma"):
        store.acquire(f"id-{name}", f"driver of {name}", 60)
    store.release(Lease("id-gamma", "driver of gamma", 1))
    assert set(store.controls()) == {alpha, "id-beta", "id-gamma", "id-delta"}
    assert store.running() == {key: store.control(key) for key in (alpha, "id-beta")}
    store.release(Lease("id-beta", "driver of beta", 1))
    store.acquire("id-beta", gone_owner(), 60)
    assert store.running() == {alpha: store.control(alpha)}
    assert {key for key, control in store.controls().items() if control.alive} == {alpha}


def test_a_defect_leaves_no_connection_in_an_old_snapshot(store: Store, alpha: str) -> None:
    half_read = []

    def fail_halfway() -> None:
        with store.transaction() as connection:
            half_read.append(connection.execute(text("SELECT name FROM searches UNION ALL SELECT 'another'")))
            half_read[0].fetchone()
            raise TypeError("a row that nobody expected, in the middle of a result")

    with pytest.raises(TypeError):
        fail_halfway()
    with Store.open(store.url) as other:
        other.acquire(alpha, "driver", 60)
    assert store.control(alpha).owner == "driver"
    assert half_read, "it lives on, as in a traceback that somebody keeps"


def test_a_lease_without_an_expiry_is_expired(store: Store, alpha: str) -> None:
    first = store.acquire(alpha, "first", 60)
    with transaction(store._engine, write=True) as connection:
        connection.execute(text("UPDATE leases SET expires_at = NULL"))
        assert leases.revoke_expired(connection) == set()
        connection.execute(text("UPDATE leases SET owner = 'first'"))
    found = store.control(alpha)
    assert not found.alive and found.fault is not None and "no time of expiry" in found.fault
    store.acquire(alpha, "second", 60)
    assert store.control(alpha).alive and store.control(alpha).fault is None
    with pytest.raises(LeaseLostError):
        store.set_status(first, "finished")


def test_processes_of_this_machine_are_known_to_be_gone() -> None:
    mine = this_process()
    assert not is_gone(mine) and not is_on_another_machine(mine)
    with subprocess.Popen([sys.executable, "-c", "pass"]) as child:
        # It ends in a moment, and nobody has waited for it yet.
        until(lambda: is_gone(mine.replace(f" {os.getpid()} ", f" {child.pid} ")))
    ended = gone_owner()
    assert is_gone(ended)
    machine, numbering = ended.rpartition(" (")[2].rstrip(")").split(", ")
    for elsewhere in (ended.replace(machine, "0"), ended.replace(numbering, "0"), "somebody else"):
        assert not is_gone(elsewhere), "a copy of this machine, or a container on it, has other processes"
    assert is_on_another_machine(ended.replace(machine, "0")) and not is_on_another_machine(
        ended.replace(numbering, "0")
    )


def test_an_owner_in_a_container_is_not_taken_for_gone() -> None:
    code = "import sys, moevolve.store.leases as o; print(o.is_gone(sys.argv[1]))"
    asked = [sys.executable, "-c", code, this_process()]
    done = subprocess.run(["unshare", "--pid", "--fork", *asked], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"processes can't be set apart here: {done.stderr.strip()}")
    assert done.stdout == "False\n"
