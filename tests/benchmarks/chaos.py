"""Disturbs whole searches at random moments and compares how they end. Not a test: run it by hand.

    python tests/benchmarks/chaos.py [--runs 100] [--seed 0] [--kinds driver-killed node-lost ...]

Every run is one search of 60 individuals whose fitness costs nothing, in a database of its own (PostgreSQL, for some
kinds SQLite in turn), or for `layers-killed` one of eight repaired individuals of the text demo's model, whose experts
stay on the disk. It is disturbed by one kind of fault up to three times, at moments drawn from (seed, run). Drivers are
processes; workers are actors on a Ray of one head and two nodes where the kind needs them, else they are in the driver.
What ended or was refused is started again, as a user or a scheduler would. Afterwards the population must be the
undisturbed one (index, genome and its hash, status, fitness, tie-break, parents), every phenotype evaluated once, and
the store sound. Printed, by kind: runs, faults, runs that came out otherwise, individuals lost, and individuals or
evaluations that are there twice.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import bench
import disturbed_lab
import httpx2
import local_workers
import numpy as np
from disturbed_lab import (
    LEASE_S,
    REFUSED,
    Drive,
    Population,
    cut_connections,
    population,
    wait_for,
)
from killing import serving
from postgres_server import Server, running_server
from ray_nodes import FRUGAL
from sqlalchemy import text

from moevolve.search.config.run import RunConfig
from moevolve.search.genomes.contract.operators import generator
from moevolve.search.loop.setup import SearchSetup
from moevolve.search.pools.local import LocalPool
from moevolve.search.running.set_up import set_up
from moevolve.store.errors import NotRunningError
from moevolve.store.reader import StoreReader
from moevolve.store.repository import Store
from moevolve.store.upkeep.check import check

# What a driver's process does.
DRIVE = disturbed_lab._run


@dataclass
class Run:
    """One search and what is done to it.

    Attributes:
        url: of its database.
        folder: for logs.
        server: the PostgreSQL.
        cluster: the Ray cluster, for kinds that need one.
        rng: of the moments.
        total: individuals of the search.
        wait: most seconds between an individual and the fault after it.
        faults: so far.
        refused: drivers that were, because another one had the search.
    """

    url: str
    folder: Path
    server: Server
    cluster: Any
    rng: np.random.Generator
    total: int
    wait: float
    faults: int = 0
    refused: int = 0
    drivers: list[Drive] = field(default_factory=list)

    def start(self) -> Drive:
        """One more driver."""
        self.drivers.append(
            Drive(self.url, self.folder, address=None if self.cluster is None else self.cluster.address)
        )
        return self.drivers[-1]

    def moments(self, most: int = 3) -> Iterator[None]:
        """Waits for random moments of the search, while its last driver runs."""
        goals = sorted(
            self.rng.choice(self.total - self.total // 10, size=int(self.rng.integers(1, most + 1)), replace=False)
        )
        for goal in goals:
            wait_for(self.url, 1 + int(goal), self.drivers[-1])  # the store is there by then
            time.sleep(float(self.rng.uniform(0, self.wait)))
            if not self.drivers[-1].running:
                return
            self.faults += 1
            yield

    def finish(self) -> None:
        """Start drivers until one comes to the end of the search.

        Raises:
            RuntimeError: none does, or one ends otherwise than by what was done to it.
        """
        for _ in range(5):
            driver = self.drivers[-1]
            code = driver.end()
            if code == 0:
                return
            if code not in (REFUSED, -signal.SIGKILL):
                raise RuntimeError(f"a driver ended with {code}: {driver.said}")
            self.refused += code == REFUSED
            self.start()
        raise RuntimeError(f"no driver ends the search: {self.drivers[-1].said}")


def kill_driver(run: Run) -> None:
    """SIGKILL; the next one takes over at once."""
    for _ in run.moments():
        run.drivers[-1].kill()
        run.start()


def suspend_driver(run: Run) -> None:
    """SIGSTOP until past its lease, and SIGCONT while the next one drives, or after that."""
    for _ in run.moments(1):
        asleep = run.drivers[-1]
        asleep.signal(signal.SIGSTOP)
        with StoreReader.open(run.url) as store:
            while store.control("id-lab").alive:
                time.sleep(0.1)
            epoch, other = store.control("id-lab").epoch, run.start()
            # A driver that wakes up sooner keeps its search: nobody has taken it.
            while store.control("id-lab").epoch == epoch and other.running:
                time.sleep(0.05)
            taken = store.control("id-lab").epoch != epoch
        wait_for(run.url, int(run.rng.integers(run.total)), run.drivers[-1])
        asleep.signal(signal.SIGCONT)
        if not taken:
            # It fell asleep in a write, which keeps a SQLite file locked: the search is its own still.
            run.refused += 1
            run.drivers.append(asleep)
        elif asleep.end() != REFUSED:
            raise RuntimeError(f"a driver that slept past its lease wasn't refused: {asleep.said}")


def cut(run: Run) -> None:
    """Every connection to the database is ended from its side."""
    for _ in run.moments():
        cut_connections(run.url)


def restart_database(run: Run) -> None:
    """The server goes away for up to the length of a lease, in good order or as in a crash."""
    for _ in run.moments(1):
        run.server.stop(signal.SIGINT if run.rng.random() < 0.5 else signal.SIGQUIT)
        time.sleep(float(run.rng.uniform(0, LEASE_S - 1)))
        run.server.start()


def kill_worker(run: Run) -> None:
    """SIGKILL for the worker that evaluated last."""
    for _ in run.moments(2):
        with StoreReader.open(run.url) as store, store.transaction() as connection:
            newest = connection.execute(
                text("SELECT worker FROM evaluations ORDER BY created_at DESC LIMIT 1")
            ).scalar()
        with suppress(ProcessLookupError):
            os.kill(int(str(newest).rpartition("/")[2]), signal.SIGKILL)


def lose_node(run: Run) -> None:
    """SIGKILL for a raylet; another node joins."""
    for _ in run.moments(1):
        nodes = sorted(run.cluster.worker_nodes, key=lambda node: str(node.node_id))
        run.cluster.remove_node(nodes[int(run.rng.integers(len(nodes)))], allow_graceful=False)
        add_node(run.cluster)


def kill_server(run: Run) -> None:
    """SIGKILL for a server that lets a paused search go on, pauses it again, and is read by others meanwhile."""
    for _ in run.moments(1):
        with Store.open(run.url) as store, suppress(NotRunningError):
            store.ask("id-lab", "paused")
        # However the search stands by now, the server says so, and does no harm.
        first = Served(run.url, run.folder)
        answers = [first.ask("POST", f"/api/searches/lab/{verb}") for verb in ("resume", "pause", "resume")]
        reading = subprocess.Popen(["curl", "-sN", f"{first.address}/api/news"], stdout=subprocess.DEVNULL)
        time.sleep(float(run.rng.uniform(0, 1)))
        first.process.kill()
        for each in (first.process, reading):
            each.wait()
        second = Served(run.url, run.folder)
        answers.append(second.ask("GET", "/api/searches/lab/course"))
        second.process.terminate()
        if second.process.wait() or any(answer >= 500 for answer in answers):
            raise RuntimeError(f"the server answered {answers}")


class Served:
    """A server on a store, once it answers."""

    def __init__(self, url: str, folder: Path) -> None:
        self.process, self.address = serving(url, folder)

    def ask(self, method: str, path: str) -> int:
        """The status that it answers with."""
        return httpx2.request(method, self.address + path, headers={"x-moevolve": "1"}, json={}).status_code


@dataclass(frozen=True)
class Kind:
    """A kind of fault: who does it, where its stores are, and what it takes.

    Attributes:
        ray: a Ray cluster.
        layered: a search that runs a model one layer at a time.
    """

    disturb: Callable[[Run], None]
    sqlite: bool = False
    ray: bool = False
    layered: bool = False


KINDS = {
    "driver-killed": Kind(kill_driver, sqlite=True),
    "driver-asleep": Kind(suspend_driver, sqlite=True),
    "connections-cut": Kind(cut),
    "database-restarted": Kind(restart_database),
    "worker-killed": Kind(kill_worker, sqlite=True, ray=True),
    "node-lost": Kind(lose_node, ray=True),
    "server-killed": Kind(kill_server, sqlite=True),
    "layers-killed": Kind(kill_driver, sqlite=True, layered=True),
}
"""A further victim is a function of a run, and a line here."""


def main() -> None:
    parser = bench.arguments(__doc__)
    parser.add_argument("--runs", type=int, default=100, help="in all; the kinds take turns")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    options = parser.parse_args()
    os.environ["RAY_AUTH_MODE"] = "disabled"
    totals: dict[str, Counter[str]] = {name: Counter() for name in options.kinds}
    with tempfile.TemporaryDirectory() as scratch, running_server() as server:
        folder = Path(scratch)
        # One kind after the other, so that a cluster is there only while it is needed.
        for name in options.kinds:
            kind = KINDS[name]
            numbers = [number for number in range(options.runs) if options.kinds[number % len(options.kinds)] == name]
            with (
                ray_cluster() if kind.ray else nullcontext() as cluster,
                patch.object(disturbed_lab, "_run", drive_layered if kind.layered else DRIVE),
            ):
                calm = undisturbed(folder / name)
                for number in numbers:
                    url = database(number, kind.sqlite, folder, server)
                    rng, wait = generator(options.seed, number), 1.0 if kind.layered else 0.1
                    run = Run(url, folder, server, cluster, rng, len(calm), wait)
                    totals[name] += attempt(kind, run, calm, f"{name} {number}")
    report(totals)
    if any(total["otherwise"] or total["lost"] or total["twice"] for total in totals.values()):
        sys.exit(1)


def drive_layered(*arguments: Any) -> None:
    """In a driver's process: the other search, with candidates of a model whose experts are on the disk."""

    def pool(setup: SearchSetup, **_: object) -> LocalPool:
        return local_workers.local_pool(setup)

    with patch.multiple(disturbed_lab, setup_of=layered_setup, local_pool=pool):
        DRIVE(*arguments)


def layered_setup(url: str, name: str, address: str | None = None) -> SearchSetup:
    counts = {"calibration": 24, "search": 8}
    data: dict[str, Any] = {
        "name": name,
        "store": url,
        "model": {"path": str(bench.ROOT / "configs" / "demo" / "text"), "device": "cpu", "expert_offload": "disk"},
        "tasks": [{"name": "text-code", "counts": counts}],
        "genome": {"experts": 8, "groups": "per_layer", "calibration_tokens": 2048, "calibration_most": 2048},
        "phases": [
            {"kind": "prune", "evaluations": 6, "initial": 4, "init": ["energy", "reap", "random"], "repair": {}},
            {"kind": "repair", "evaluations": 2, "repair": {"input_rounds": 1}},
        ],
        "window": 2,
        "engine": {"threads": 1},
        "final": {"rerank": 0, "test": False, "random_baselines": 0},
    }
    return set_up(RunConfig.model_validate(data), f"id-{name}")


def undisturbed(folder: Path) -> Population:
    """What the search comes to if nothing happens to it."""
    folder.mkdir()
    url = f"sqlite:///{folder / 'undisturbed.db'}"
    driver = Drive(url, folder)
    if driver.end():
        raise RuntimeError(f"the undisturbed search failed: {driver.said}")
    return population(url)


def attempt(kind: Kind, run: Run, calm: Population, label: str) -> Counter[str]:
    """One run; says at once if it came out otherwise."""
    began = time.monotonic()
    run.start()
    reason = ""
    try:
        kind.disturb(run)
        run.finish()
    except (RuntimeError, AssertionError) as error:
        reason = str(error)
    found = population(run.url)
    lost = len({row[0] for row in calm} - {row[0] for row in found})
    problems, twice = soundness(run.url)
    twice += len(found) - len({row[0] for row in found})
    reason = reason or "; ".join(problems[:3]) or ("" if found == calm else "another population")
    if reason or lost or twice:
        print(f"{label}: {reason}", flush=True)
    seconds = time.monotonic() - began
    print(f"{label}: {run.faults} faults, {run.refused} refused, {seconds:.1f} s", file=sys.stderr, flush=True)
    return Counter(
        runs=1, faults=run.faults, otherwise=int(bool(reason)), lost=lost, twice=twice, seconds=round(seconds)
    )


def soundness(url: str) -> tuple[tuple[str, ...], int]:
    """What is wrong with a store, and evaluations more than there are phenotypes."""
    with StoreReader.open(url) as store:
        found = check(store)
        with store.transaction() as connection:
            phenotypes = connection.execute(text("SELECT count(DISTINCT phenotype_hash) FROM individuals")).scalar_one()
    return found.problems, found.evaluations - int(phenotypes) - 1  # and the full model's


def database(number: int, sqlite: bool, folder: Path, server: Server) -> str:
    """URL of an empty one."""
    if sqlite and number // len(KINDS) % 2:
        return f"sqlite:///{folder / f'run-{number}.db'}"
    import psycopg

    with psycopg.connect(server.url, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE run_{number}")
    return server.url_of(f"run_{number}")


@contextmanager
def ray_cluster() -> Iterator[Any]:
    """A head without CPUs, and two nodes of one each."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **FRUGAL})
    try:
        for _ in range(2):
            add_node(cluster)
        yield cluster
    finally:
        cluster.shutdown()


def add_node(cluster: Any) -> None:
    cluster.add_node(num_cpus=1, include_log_monitor=False)


def report(totals: dict[str, Counter[str]]) -> None:
    columns = ("runs", "faults", "otherwise", "lost", "twice")
    print(f"| {'kind':<18} | " + " | ".join(f"{name:>9}" for name in columns) + " |")
    for name, total in totals.items():
        print(f"| {name:<18} | " + " | ".join(f"{total[column]:>9}" for column in columns) + " |")


if __name__ == "__main__":
    main()
