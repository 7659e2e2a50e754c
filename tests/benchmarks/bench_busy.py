"""Measures how busy the driver keeps many workers whose evaluations take a second. Not a test: run it by hand.

    python tests/benchmarks/bench_busy.py [--workers 256] [--seconds 1.0] [--individuals 10240] [--windows 512]

Workers only sleep, and many of them live in one process (a Ray actor of many threads), since few machines have room for
256 processes; pool, messages, driver and store are the real ones. Busy is slept time over workers x wall time, from the
first request to the last evaluation. A window of twice the workers lets stragglers finish without anybody waiting.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from itertools import cycle
from pathlib import Path
from typing import Any

import no_op_search
import ray
from no_op_search import SPLIT, reply_to, set_up

from moevolve.evaluators.types import PreparedSplit
from moevolve.search.config.run import WorkersSection
from moevolve.search.loop.evaluation_cache import EvaluationCache
from moevolve.search.loop.search_loop import SearchLoop
from moevolve.search.pools.ray_pool import RayPool
from moevolve.search.running.launch import register
from moevolve.search.strategies.phased import make_strategy
from moevolve.store.repository import Store
from moevolve.workers.contract.messages import EvaluationReply, EvaluationRequest, WorkerInfo
from moevolve.workers.contract.settings import EngineConfig, ModelConfig
from moevolve.workers.worker import EvaluationWorker

PROCESSES = 4


class SleepingWorker(EvaluationWorker):
    """Many workers in one: each call sleeps as long as an evaluation takes."""

    def __init__(self, *arguments: Any) -> None:
        self._seconds: float = arguments[-1]

    def info(self, node: str = "") -> WorkerInfo:
        return WorkerInfo("sleeper", node, "cpu")

    def evaluate(self, request: EvaluationRequest, splits: tuple[PreparedSplit, ...]) -> EvaluationReply:
        time.sleep(self._seconds)
        return reply_to(request)


class CrowdedPool(RayPool):
    """A pool whose workers share a few processes."""

    def __init__(self, workers: WorkersSection, seconds: float) -> None:
        self._processes: Any = None
        super().__init__(workers, ModelConfig("nowhere"), EngineConfig(), {SPLIT.fingerprint: SPLIT}, SleepingWorker)
        self._load_args = (*self._load_args, seconds)

    def _new_actor(self) -> Any:
        if self._processes is None:
            crowd = self._workers.count // PROCESSES + 1
            actor = self._actor_class.options(max_concurrency=crowd)
            self._processes = cycle([actor.remote() for _ in range(PROCESSES)])
        return next(self._processes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
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
    pool = CrowdedPool(workers, seconds)
    with tempfile.TemporaryDirectory() as folder, Store.open(f"sqlite:///{Path(folder) / 'bench.db'}") as store:
        register(setup, store)
        while pool.ready < workers.count:
            pool.poll(0.1)
        cache = EvaluationCache(store, pool, setup.search_id, setup.facts.fingerprint, "engine")
        started = time.perf_counter()
        SearchLoop(setup, make_strategy(setup.config, setup.space, setup.schedule), store, cache).run()
        wall = time.perf_counter() - started
    pool.close()
    return wall


if __name__ == "__main__":
    main()
