"""Measures the driver and SQLite with a fitness that costs nothing. Not a test: run it by hand.

    python tests/benchmarks/bench_driver.py [--individuals 5000 20000] [--window 64] [--profile]

Every search is EEP's on Mixtral-8x7B's shape (4 of 8 experts, 4 groups): a fifth of the individuals prune, the others
merge. The pool answers at most `--batch` requests per poll. Printed: individuals per second, and the seconds from
opening a store whose last window is unfinished to the first request of the resumed search.
"""

from __future__ import annotations

import cProfile
import pstats
import tempfile
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import bench
from no_op_search import reply_to, set_up
from search_lab import drive

from moevolve.search.running.launch import register
from moevolve.store.repository import Store
from moevolve.workers.contract.messages import EvaluationReply, EvaluationRequest


class Dispatched(Exception):
    """The resumed search sent its first request."""


@dataclass
class IdlePool:
    """Answers at once, with a score that depends on the candidate.

    Attributes:
        batch: answers per poll at most.
        stop_after: requests after which `Dispatched` is raised; None never raises it.
    """

    batch: int
    stop_after: int | None = None
    requests: deque[EvaluationRequest] = field(default_factory=deque)
    submitted: int = 0

    def submit(self, request: EvaluationRequest) -> None:
        if self.submitted == self.stop_after:
            raise Dispatched
        self.submitted += 1
        self.requests.append(request)

    def poll(self, timeout: float) -> list[EvaluationReply]:
        count = min(self.batch, len(self.requests))
        return [reply_to(self.requests.popleft()) for _ in range(count)]

    def close(self) -> None:
        self.requests.clear()


def main() -> None:
    parser = bench.arguments(__doc__)
    parser.add_argument("--individuals", type=int, nargs="+", default=[5000, 20000])
    parser.add_argument("--window", type=int, default=64)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 16], help="answers per poll")
    parser.add_argument("--threshold", action="store_true", help="parents within a threshold of the best, else top-k")
    parser.add_argument("--profile", action="store_true", help="print the 25 functions that take longest")
    options = parser.parse_args()
    for individuals in options.individuals:
        for batch in options.batch:
            with tempfile.TemporaryDirectory() as folder:
                measure(Path(folder), individuals, options.window, batch, options.threshold, options.profile)


def measure(
    folder: Path,
    individuals: int,
    window: int,
    batch: int,
    threshold: bool,
    profile: bool,
) -> None:
    """One search up to its last window, then one resume of it."""
    setup = set_up(individuals, window, threshold)
    with Store.open(f"sqlite:///{folder / 'bench.db'}") as store:
        register(setup, store)
        profiler = cProfile.Profile()
        started = time.perf_counter()
        if profile:
            profiler.enable()
        with suppress(Dispatched):
            drive(store, setup, IdlePool(batch, stop_after=individuals - window))
        profiler.disable()
        seconds = time.perf_counter() - started
        done = len(store.history(setup.search_id))
    if profile:
        pstats.Stats(profiler).sort_stats("tottime").print_stats(25)
    started = time.perf_counter()
    with Store.open(f"sqlite:///{folder / 'bench.db'}") as store, suppress(Dispatched):
        drive(store, setup, IdlePool(batch, stop_after=0))
    resumed = time.perf_counter() - started
    print(
        f"{done:>7,} individuals, window {window}, {batch:>2} answers per poll: "
        f"{done / seconds:>6,.0f} individuals/s; resume to the first request {resumed:.2f} s"
    )


if __name__ == "__main__":
    main()
