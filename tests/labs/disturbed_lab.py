"""Whole searches in processes of their own, with a fitness that costs nothing, to be disturbed while they run."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import search_lab
from killing import forked
from light_workers import LightWorker
from search_lab import make_lab_setup, run_config, scored, smooth
from waiting import PATIENT_S, until

from moevolve.evaluators.errors import UserError
from moevolve.search.loop.setup import SearchSetup
from moevolve.search.pools.base import Pool
from moevolve.search.pools.local import LocalPool
from moevolve.search.running.execute import execute
from moevolve.search.running.launch import register
from moevolve.search.running.observer import Observer
from moevolve.store.errors import StoreError
from moevolve.store.reader import StoreReader
from moevolve.store.repository import Store
from moevolve.workers.contract.messages import EvaluationReply, EvaluationRequest

TOTAL = 60
LEASE_S = 3.0
REFUSED = 2
"""Exit code of a driver that the store refused."""


class CheapWorker(LightWorker):
    """Scores what it is sent after a moment."""

    def __init__(self, *_: object, seconds: float) -> None:
        self._seconds = seconds

    def reply(self, request: EvaluationRequest) -> EvaluationReply:
        time.sleep(self._seconds)
        return scored(smooth)(request)


def local_pool(setup: SearchSetup, seconds: float = 0.0, **_: object) -> Pool:
    """A worker in the driver's own process."""
    return LocalPool(partial(CheapWorker, seconds=seconds), setup.all_prepared)


def slow_pool(setup: SearchSetup, **_: object) -> Pool:
    """The same with evaluations that take long enough for a search to be stopped in the middle."""
    return local_pool(setup, 0.2)


def resident_pool(setup: SearchSetup, **_: object) -> Pool:
    """A worker in the driver's own process that has the model; a shrink doesn't time models after it."""
    import local_workers

    from moevolve.search.shrink import shrink

    vars(shrink)["measured_speed"] = lambda *_: None  # timing takes two more processes
    return local_workers.local_pool(setup)


def ray_pool(setup: SearchSetup, seconds: float = 0.0) -> Pool:
    """Such workers on Ray."""
    import disturbed_lab
    import ray

    from moevolve.search.pools.ray_pool import RayPool

    for module in (disturbed_lab, search_lab):
        ray.cloudpickle.register_pickle_by_value(module)  # workers can't import what is the tests' own
    config, worker = setup.config, partial(CheapWorker, seconds=seconds)
    return RayPool(config.workers, config.model, config.engine, setup.all_prepared, worker)


def setup_of(url: str, name: str = "lab", address: str | None = None) -> SearchSetup:
    """The search: 60 individuals with a window of 6; those of one name are the same."""
    workers = {"count": 2, "num_cpus": 0.5, "address": address}
    final = {"rerank": 0, "test": False}
    config = run_config(name=name, store=url, workers=workers, final=final, seed=sum(name.encode()))
    return make_lab_setup(config, f"id-{name}")


def drive(url: str, name: str, address: str | None = None, seconds: float = 0.0) -> None:
    """Launch the search or go on with it, in this process; an evaluation takes so many seconds."""
    setup = setup_of(url, name, address)
    with Store.open(url) as store:
        with suppress(UserError):  # it is there already
            register(setup, store)
        execute(setup, store, Observer(), partial(local_pool if address is None else ray_pool, seconds=seconds))


class Drive:
    """A driver's process, forked from one that has imported everything already."""

    def __init__(self, url: str, folder: Path, name: str = "lab", address: str | None = None) -> None:
        self._log = folder / f"driver-{time.monotonic_ns()}.log"
        self._process = forked(_run, url, name, address, self._log)
        assert self._process.pid is not None
        self.pid: int = self._process.pid

    @property
    def running(self) -> bool:
        return self._process.exitcode is None

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        """As power cuts do."""
        self._process.kill()
        self._process.join()

    def end(self, timeout: float = PATIENT_S) -> int:
        """How it ended."""
        self._process.join(timeout)
        assert self._process.exitcode is not None, f"still running: {self.said}"
        return self._process.exitcode

    @property
    def said(self) -> str:
        return self._log.read_text() if self._log.exists() else "nothing"


def _run(url: str, name: str, address: str | None, log: Path) -> None:
    os.setsid()
    with log.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    from moevolve.search.running import execute as driving

    vars(driving)["LEASE_S"] = LEASE_S
    try:
        drive(url, name, address, 0.02)
    except StoreError as error:
        print(f"{type(error).__name__}: {error}", flush=True)
        raise SystemExit(REFUSED) from None


def done(url: str, name: str = "lab") -> int:
    """Individuals that are decided; 0 while the store can't be had."""
    try:
        with StoreReader.open(url) as store:
            return next((row.evaluated + row.failed for row in store.searches() if row.search.name == name), 0)
    except StoreError:
        return 0


def wait_for(url: str, goal: int, drive: Drive | None = None, name: str = "lab") -> None:
    """Until so many individuals are decided, or the driver has ended."""
    until(
        lambda: done(url, name) >= goal or (drive is not None and not drive.running),
        why=lambda: "the search makes no progress",
    )


Population = list[tuple[Any, ...]]


def population(url: str, name: str = "lab") -> Population:
    """What must be the same however a search was disturbed."""
    with StoreReader.open(url) as store:
        return search_lab.population(store, f"id-{name}")


def undisturbed(folder: Path, name: str = "lab") -> Population:
    """What the search comes to if nothing happens to it."""
    url = f"sqlite:///{folder / 'undisturbed.db'}"
    drive(url, name)
    return population(url, name)


def cut_connections(url: str) -> int:
    """Ends every other connection to a PostgreSQL database; how many there were."""
    from sqlalchemy import text

    others = "datname = current_database() AND pid <> pg_backend_pid()"
    query = f"SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE {others}"
    with StoreReader.open(url) as store, store.transaction() as connection:
        return int(connection.execute(text(query)).scalar_one())
