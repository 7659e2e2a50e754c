"""Loads a server with readers while searches are driven on its store. Not a test: run it by hand.

    python tests/benchmarks/load_server.py [--seconds 300] [--readers 200] [--drivers 2] [--store postgres|sqlite]

Drivers launch one search of 60 individuals after another, whose fitness costs nothing, on one store, while so many
readers ask `moevolve serve` for whatever it has, each again as soon as it is answered, and one more steers the newest
search. Printed, by route: answers, median and 99th percentile in milliseconds, and answers other than 2xx and 404 of
searches that are yet to come; then the searches that are finished whole and sound. It exits with 1 if an answer was an
error, or anything is lost or twice.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import tempfile
import threading
import time
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path

import bench
import httpx2
from disturbed_lab import TOTAL, Drive, population, undisturbed
from killing import serving
from postgres_server import running_server

from moevolve.store.reader import StoreReader
from moevolve.store.repository import Store
from moevolve.store.upkeep.check import check

ROUTES = (
    "/api/searches",
    "/api/searches/{search}",
    "/api/searches/{search}/control",
    "/api/searches/{search}/individuals?order=newest",
    "/api/searches/{search}/individuals?order=best&limit=20",
    "/api/searches/{search}/course?points=200",
    "/api/searches/{search}/costs",
    "/api/searches/{search}/events",
    "/api/individuals/{search}:3",
    "/api/individuals/{search}:30/ancestors",
    "/api/best?limit=5&split=search",
    "/api/events?limit=20",
    "/metrics",
    "/healthz",
)
_COMPARED = 10
"""Searches that are run once more undisturbed, and compared."""


_PROCESSES = threading.Lock()
"""Starting a process asks how all others ended, which one thread at a time may: a second finds nothing to read."""


class Readers:
    """What was asked, and how it was answered."""

    def __init__(self, url: str, names: list[str]) -> None:
        self.took: defaultdict[str, list[float]] = defaultdict(list)
        self.errors: list[str] = []
        self._url, self._names = url, names

    async def run(self, readers: int, seconds: float) -> None:
        limits = httpx2.Limits(max_connections=readers)
        until = time.monotonic() + seconds
        async with httpx2.AsyncClient(base_url=self._url, limits=limits, timeout=60) as client:
            await asyncio.gather(*(self._read(client, number, until) for number in range(readers)))

    async def _read(self, client: httpx2.AsyncClient, number: int, until: float) -> None:
        turn = number
        while time.monotonic() < until:
            route = ROUTES[turn % len(ROUTES)]
            turn += 1
            began = time.monotonic()
            try:
                answer = await client.get(route.replace("{search}", self._names[-1]))
            except httpx2.HTTPError as error:
                self.errors.append(f"{route}: {type(error).__name__} {error}")
                continue
            self.took[route].append(time.monotonic() - began)
            if not answer.is_success and answer.status_code != 404:
                self.errors.append(f"{route}: {answer.status_code} {answer.text[:200]}")


def _runs(driver: Drive) -> bool:
    with _PROCESSES:
        return driver.running


def keep_driving(url: str, folder: Path, lane: int, names: list[str], ended: threading.Event) -> None:
    """Launch one search after the other."""
    number = 0
    while not ended.is_set():
        name = f"lab-{lane}-{number}"
        names.append(name)
        with _PROCESSES:
            driver = Drive(url, folder, name)
        while _runs(driver):
            time.sleep(0.01)
        code = driver.end()
        if code:
            names.remove(name)
            print(f"{name}: its driver ended with {code}: {driver.said}", flush=True)
        number += 1


def main() -> None:
    parser = bench.arguments(__doc__)
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--readers", type=int, default=200)
    parser.add_argument("--drivers", type=int, default=2)
    parser.add_argument("--store", choices=("postgres", "sqlite"), default="postgres")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        folder = Path(scratch)
        url = f"sqlite:///{folder / 'load.db'}"
        if options.store == "postgres":
            url = stack.enter_context(running_server()).url
        Store.open(url).close()
        server, address = serving(url, folder)
        stack.callback(server.kill)
        names, ended = ["lab-0-0"], threading.Event()
        drivers = [
            threading.Thread(target=keep_driving, args=(url, folder, number, names, ended))
            for number in range(options.drivers)
        ]
        for each in drivers:
            each.start()
        readers = Readers(address, names)
        asyncio.run(readers.run(options.readers, options.seconds))
        ended.set()
        for each in drivers:
            each.join()
        whole = report(readers, url, sorted(set(names)), folder)
    sys.exit(0 if whole and not readers.errors else 1)


def report(readers: Readers, url: str, names: list[str], folder: Path) -> bool:
    """Print what was measured; whether nothing is lost, or twice, or otherwise than undisturbed."""
    print(f"| {'route':<56} | answers | median | 99th |")
    for route in ROUTES:
        took = sorted(readers.took[route])
        if took:
            last = took[min(len(took) - 1, int(0.99 * len(took)))]
            print(f"| {route:<56} | {len(took):>7,} | {1000 * statistics.median(took):>6.0f} | {1000 * last:>4.0f} |")
    print(f"errors: {len(readers.errors)}")
    for error in readers.errors[:5]:
        print(f"  {error}")
    with StoreReader.open(url) as store:
        rows = {row.search.name: row for row in store.searches()}
        found = check(store)
    finished = [name for name in names if rows[name].search.status == "finished" and rows[name].individuals == TOTAL]
    same = [population(url, name) == undisturbed(_fresh(folder, name), name) for name in finished[:_COMPARED]]
    print(f"searches: {len(finished)} of {len(names)} finished whole, {sum(same)} of {len(same)} as undisturbed")
    print(f"problems of the store: {len(found.problems)}")
    return len(finished) == len(names) and all(same) and not found.problems


def _fresh(folder: Path, name: str) -> Path:
    made = folder / f"again-{name}"
    made.mkdir()
    return made


if __name__ == "__main__":
    main()
