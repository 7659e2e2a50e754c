"""Processes that open a store, forked from one that has imported everything already."""

from __future__ import annotations

import ctypes
import multiprocessing
import time
from typing import Any

from killing import forked
from store_samples import decided, evaluation, individual
from waiting import PATIENT_S

from moevolve.store.repository import Store


def open_once(url: str) -> None:
    """Open a store, which makes it if there is none, and close it."""
    Store.open(url).close()


def write_for_ever(url: str, search_id: str, committed: Any) -> None:
    """Write batches of twenty: individuals with parents, evaluations and fitness in one transaction each."""
    store = Store.open(url, create=False)
    start = len(store.history(search_id))
    while True:
        span = range(start, start + 20)
        store.record(
            search_id,
            [decided(individual(i, [i - 1, i // 2] if i else [], genome=bytes(2000)), (i % 97) / 97) for i in span],
            [evaluation(i, (i % 97) / 97) for i in span],
        )
        start += 20
        committed.value = start


class Writer:
    """A process that runs `write_for_ever`."""

    def __init__(self, url: str, search_id: str) -> None:
        self._committed: Any = multiprocessing.get_context("forkserver").RawValue(ctypes.c_longlong, 0)
        self._process = forked(write_for_ever, url, search_id, self._committed)

    @property
    def running(self) -> bool:
        return self._process.exitcode is None

    @property
    def committed(self) -> int:
        """Individuals of the search that it says to be there, 0 before its first batch."""
        return int(self._committed.value)

    def wait(self) -> None:
        """Until it has written something."""
        deadline = time.monotonic() + PATIENT_S
        while not self.committed:
            assert self.running and time.monotonic() < deadline
            time.sleep(0.002)

    def kill(self) -> int:
        """Kill it; what it has said until then."""
        self._process.kill()
        self._process.join()
        return self.committed
