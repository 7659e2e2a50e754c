"""Holding a search while it runs: the lease is renewed in the background, and what is asked of the driver is heard."""

from __future__ import annotations

import logging
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Self

from moevolve.store.errors import LeaseLostError, StoreError
from moevolve.store.records import Claim, Control, Lease, Progress
from moevolve.store.repository import Store
from moevolve.store.session import INTERRUPTED_S

log = logging.getLogger(__name__)

_BEAT_S = 1.0
"""How often a lease is renewed, and looked whether something is asked."""
_BRIEFLY_S = 30.0
"""How long a lease for a few writes lasts if its owner dies over them."""
_LOCKED_S = 600.0
"""How long a driver waits for another process that writes to its SQLite file, where nobody can take its lease then."""


class Driving:
    """A search's lease, for the length of a `with` block.

    Args:
        store: where the search is.
        search_id: of the search.
        seconds: that the lease lasts when it isn't renewed.
        priority: of the search from now on.
        claim: what it could use of a cluster; asked with every renewal.

    Meanwhile the store waits for a database that restarts, as long as the lease lasts; for a SQLite file that another
    process writes to ten minutes, for until it ends nobody else can have the lease either.

    Raises:
        LeaseHeldError: on entering, if another driver runs the search.
        StoreError: on entering, if a driver on another machine writes to the same SQLite file.
    """

    def __init__(
        self,
        store: Store,
        search_id: str,
        seconds: float,
        priority: int = 0,
        claim: Callable[[], Claim | None] = lambda: None,
    ) -> None:
        self._store, self._search_id, self._seconds = store, search_id, seconds
        self._priority, self._claim = priority, claim
        self._running: dict[str, Control] | None = None
        self._ended = threading.Event()
        self._lost: StoreError | None = None
        self._stage: str | None = None
        self._progress: Progress | None = None
        self._thread = threading.Thread(target=self._beat, name=f"lease of {search_id}", daemon=True)
        self.lease: Lease

    def __enter__(self) -> Self:
        self.lease = _acquire(self._store, self._search_id, self._seconds, self._priority)
        # From here on every write is fenced, so none does harm that is tried again after a lost connection.
        self._patience_before = self._store.patience_s
        self._store.patience_s = _LOCKED_S if self._store.is_file else self._seconds
        self._control = Control(self.lease.owner, self.lease.epoch, True, "running", None, self._priority)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._store.patience_s = INTERRUPTED_S if self._store.is_file else self._seconds  # the beat's wait, too
        try:
            self._thread.join()
            if self._lost is None:
                self._store.renew(self.lease, self._seconds, self._stage, self._progress)
            self._store.release(self.lease)
        except StoreError as lost:
            log.warning("the lease of search %s was not given back, and will run out: %s", self._search_id, lost)
        finally:
            self._store.patience_s = self._patience_before

    @property
    def control(self) -> Control:
        """What is asked of this driver.

        Raises:
            LeaseLostError: the search is another one's.
            StoreError: the store could not be reached for as long as the lease lasts.
        """
        if self._lost is not None:
            raise self._lost
        return self._control

    @property
    def running_searches(self) -> dict[str, Control] | None:
        """The searches that are being run, this one among them; None as long as it has joined no cluster."""
        return self._running

    def tell_stage(self, stage: str) -> None:
        """Let everybody who reaches the store know what this driver does, with the next renewal."""
        self._stage = stage

    def tell_progress(self, progress: Progress) -> None:
        """Let everybody who reaches the store know where the search stands, with the next renewal."""
        self._progress = progress

    def _beat(self) -> None:
        renewed = time.monotonic()
        while not self._ended.wait(min(_BEAT_S, self._seconds / 3)):
            try:
                claim = self._claim()
                self._control = self._store.renew(self.lease, self._seconds, self._stage, self._progress, claim)
                renewed = time.monotonic()
                if claim is not None:
                    self._running = self._store.running()
            except LeaseLostError as error:
                self._lost = error
                return
            except StoreError as error:
                # A database that restarts comes back; only after the lease ran out may somebody else have the search.
                if time.monotonic() - renewed > self._seconds:
                    self._lost = error
                    return


@contextmanager
def held(store: Store, search_id: str) -> Iterator[Lease]:
    """A search's lease for a few writes that take no time.

    Raises:
        LeaseHeldError: a driver runs it.
    """
    lease = _acquire(store, search_id, _BRIEFLY_S)
    try:
        yield lease
    finally:
        store.release(lease)


def _acquire(store: Store, search_id: str, seconds: float, priority: int | None = None) -> Lease:
    """A search's lease for this process, unless the store is a file that another machine writes to."""
    for other, control in store.running(is_gone).items() if store.is_file else ():
        found = _OWNER.fullmatch(str(control.owner))
        if found is not None and found["machine"] != _machine():
            raise StoreError(
                f"search {store.search(other).name} of this store is being run by {control.owner}, and several "
                "machines can't write to a SQLite file: use PostgreSQL (--store postgresql://USER@HOST/NAME)"
            )
    return store.acquire(search_id, this_process(), seconds, is_gone, priority)


def this_process() -> str:
    """This process, as leases name it: for people by host, for `is_gone` by the machine that runs and the numbering."""
    return f"process {os.getpid()} on {socket.gethostname()} ({_machine()}, {_numbering()})"


def is_gone(owner: str) -> bool:
    """Whether an owner was a process that could be seen from here and is no more.

    Names of hosts don't tell that: containers have that of their host, and machines that are copies of one another the
    same one, each with processes of its own.
    """
    found = _OWNER.fullmatch(owner)
    here = found is not None and (found["machine"], found["numbering"]) == (_machine(), _numbering())
    return found is not None and here and not _runs(int(found["process"]))


_OWNER = re.compile(r"process (?P<process>\d+) on .* \((?P<machine>\S+), (?P<numbering>\S+)\)")


@cache
def _machine() -> str:
    """The machine, since it was started; elsewhere than on Linux by the name of the host."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").split("-")[0]
    except OSError:
        return socket.gethostname()


@cache
def _numbering() -> str:
    """The namespace that numbers this process and all that it can see."""
    try:
        return Path("/proc/self/ns/pid").readlink().name.strip("pid:[]")
    except OSError:
        return "all"


def _runs(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    try:
        state = Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    except OSError:
        return True
    return state != "Z"  # ended, but nobody has asked how
