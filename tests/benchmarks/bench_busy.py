"""Measures how busy the driver keeps many workers whose evaluations take a second. Not a test: run it by hand.

    python tests/benchmarks/bench_busy.py [--workers 256] [--seconds 1.0] [--individuals 10240] [--windows 512]

Workers only sleep, and many of them live in one process (a Ray actor of many threads), since few machines have room for
256 processes; pool, messages, driver and store are the real ones. Busy is slept time over workers x wall time, from the
first request to the last evaluation. A window of twice the workers lets stragglers finish without anybody waiting.
"""

from __future__ import annotations

import tempfile
import time
from itertools import cycle
from pathlib import Path
from typing import Any

import bench
import no_op_search
import ray
from light_workers import LightWorker
from no_op_search import reply_to, set_up
from search_lab import drive

from moevolve.search.config.run import WorkersSection
from moevolve.search.loop.setup import SearchSetup
from moevolve.search.pools.ray_pool import RayPool
from moevolve.search.running.launch import register
from moevolve.store.repository import Store
from moevolve.workers.contract.messages import EvaluationReply, EvaluationRequest

PROCESSES = 4


class SleepingWorker(LightWorker):
    """Many workers in one: each call sleeps as long as an evaluation takes."""

    def __init__(self, *arguments: Any) -> None:
        self._seconds: float = arguments[-1]

    def reply(self, request: EvaluationRequest) -> EvaluationReply:
        time.sleep(self._seconds)
        return reply_to(request)


class CrowdedPool(RayPool):
    """A pool whose workers share a few processes."""

    def __init__(self, workers: WorkersSection, setup: SearchSetup, seconds: float) -> None:
        self._processes: Any = None
        super().__init__(workers, setup.config.model, setup.config.engine, setup.all_prepared, SleepingWorker)
        self._load_args = (*self._load_args, seconds)

    def _new_actor(self) -> Any:
        if self._processes is None:
            crowd = self._workers.count // PROCESSES + 1
            actor = self._actor_class.options(max_concurrency=crowd)
            self._processes = cycle([actor.remote() for _ in range(PROCESSES)])
        return next(self._processes)


def main() -> None:
    parser = bench.arguments(__doc__)
    parser.add_argument("--workers", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--individuals", type=int, default=10240)
    parser.add_argument("--windows", type=int, nargs="+", default=[512])
    options = parser.parse_args()
    ray.cloudpickle.register_pickle_by_value(no_op_search)  # workers can't import what lies beside this script
    workers = WorkersSection(count=options.workers, num_cpus=0)
    for window in options.windows:
        wall = measure(workers, options.seconds, options.individuals, window)
        busy = options.individuals * options.seconds / (options.workers * wall)
        print(
            f"{options.workers} workers of {options.seconds:g} s, window {window}: {options.individuals} individuals "
            f"in {wall:.1f} s, workers {100 * busy:.1f} % busy"
        )
    ray.shutdown()


def measure(workers: WorkersSection, seconds: float, individuals: int, window: int) -> float:
    """Seconds from the first request to the last evaluation."""
    setup = set_up(individuals, window)
    pool = CrowdedPool(workers, setup, seconds)
    with tempfile.TemporaryDirectory() as folder, Store.open(f"sqlite:///{Path(folder) / 'bench.db'}") as store:
        register(setup, store)
        while pool.ready < workers.count:
            pool.poll(0.1)
        started = time.perf_counter()
        drive(store, setup, pool)
        wall = time.perf_counter() - started
    pool.close()
    return wall


if __name__ == "__main__":
    main()
