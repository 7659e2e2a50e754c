"""Running a recorded search: one that is cancelled stays so, and other processes at its store don't end it."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest
from disturbed_lab import CheapWorker, local_pool, setup_of
from store_samples import locked
from waiting import until

from moevolve.evaluators.errors import UserError
from moevolve.evaluators.types import PreparedSplit
from moevolve.search.interface.control import CancelRequest
from moevolve.search.loop.setup import SearchSetup
from moevolve.search.pools.local import LocalPool
from moevolve.search.running.execute import execute
from moevolve.search.running.launch import register
from moevolve.search.running.observer import Observer
from moevolve.search.running.resume import take_back_failures
from moevolve.store.errors import CancelledError
from moevolve.store.repository import Store
from moevolve.workers.contract.messages import EvaluationReply, EvaluationRequest

Start = Callable[[SearchSetup, Store], object]


def run(setup: SearchSetup, store: Store) -> None:
    execute(setup, store, Observer(), local_pool)


@pytest.fixture
def setup(store: Store, monkeypatch: pytest.MonkeyPatch) -> SearchSetup:
    """Of a recorded search, with a short lease."""
    recorded = setup_of(store.url)
    register(recorded, store)
    monkeypatch.setattr("moevolve.search.running.execute.LEASE_S", 0.3)
    return recorded


@pytest.mark.parametrize("start", [run, take_back_failures], ids=["execute", "retry"])
@pytest.mark.parametrize("heard", [True, False])
def test_what_is_cancelled_is_not_run(start: Start, heard: bool, setup: SearchSetup, store: Store) -> None:
    """While no driver has it, or while one has it that ends before it hears that."""
    died = None if heard else store.acquire("id-lab", "driver", 60)
    assert CancelRequest("lab").answer(store).alive != heard
    if died is not None:
        store.release(died)
    for _ in range(2):
        with pytest.raises(CancelledError, match="search lab was cancelled"):
            start(setup, store)
        assert store.search("lab").status == "cancelled" and not store.control("id-lab").alive
    assert store.history("id-lab") == []
    with pytest.raises(UserError, match="cancelled already"):
        CancelRequest("lab").answer(store)


def test_a_retry_that_dies_leaves_a_search_that_can_be_resumed_and_a_finished_one_starts_no_worker(
    setup: SearchSetup, store: Store
) -> None:
    def unwanted(_: SearchSetup) -> LocalPool:
        raise AssertionError("there is nothing left to evaluate")

    run(setup, store)
    expected = store.history("id-lab")
    assert (len(expected), store.search("lab").status) == (60, "finished")
    assert execute(setup, store, Observer(), unwanted).winner == store.best()[0].ref
    assert store.search("lab").status == "finished"
    store.retry("id-lab", 40)  # and no more comes of it
    assert (len(store.history("id-lab")), store.search("lab").status) == (40, "interrupted")
    run(setup, store)
    assert [row.content_hash for row in store.history("id-lab")] == [row.content_hash for row in expected]
    assert store.search("lab").status == "finished"


def test_ctrl_c_ends_a_search_whose_store_is_locked(
    setup: SearchSetup, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends a wait for the file, of which there are several on the way out."""
    monkeypatch.setattr("moevolve.search.running.lease_heartbeat._LEAVING_S", 0.5)
    main, ended = threading.main_thread().ident, threading.Event()
    assert main is not None

    def interrupt() -> None:
        while not ended.wait(0.3):
            signal.pthread_kill(main, signal.SIGINT)

    with ExitStack() as stack:

        class Locking(CheapWorker):
            """Has the store locked when it evaluates its tenth candidate."""

            count = 0

            def evaluate(self, request: EvaluationRequest, splits: tuple[PreparedSplit, ...]) -> EvaluationReply:
                self.count += 1
                if self.count == 10:
                    stack.enter_context(locked(tmp_path / "store.db"))
                    stack.callback(ended.set)
                    threading.Thread(target=interrupt).start()
                return super().evaluate(request, splits)

        with pytest.raises(KeyboardInterrupt):
            execute(setup, store, Observer(), lambda _: LocalPool(partial(Locking, seconds=0.0), setup.all_prepared))
    # A renewal that waited for the file, too, may come after the interruption.
    until(lambda: all(thread.name != "lease of id-lab" for thread in threading.enumerate()))
    until(lambda: not store.control("id-lab").alive)
    run(setup, store)
    assert store.search("lab").status == "finished"
