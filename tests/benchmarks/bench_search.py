"""Measures what a search costs, from its launch to its last individual, and when the best one was found.

    python tests/benchmarks/bench_search.py [--run configs/runs/demo.yaml] [--seeds 0 1]

Seconds include the loading of workers and calibrations. The unit of cost is the full model's evaluation on the search
splits by one worker, as the store has it.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path

import bench

from moevolve.search.config.files import load_run_config
from moevolve.search.config.run import RunConfig
from moevolve.search.loop.final_table import BEST_LABEL
from moevolve.search.running.execute import execute
from moevolve.search.running.launch import register, set_up_new
from moevolve.search.running.observer import Observer
from moevolve.store.records import FULL_MODEL, Progress
from moevolve.store.repository import Store
from moevolve.workers.contract.settings import engine_fingerprint


def main() -> None:
    parser = bench.arguments(__doc__)
    parser.add_argument("--run", type=Path, default=bench.ROOT / "configs" / "runs" / "demo.yaml")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    options = parser.parse_args()
    config = load_run_config(options.run)
    print("| seed | individuals | evaluations | seconds | each | in units | best found after | search | test |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|---:|")
    for seed in options.seeds:
        print(row(config.model_copy(update={"seed": seed})), flush=True)


def row(config: RunConfig) -> str:
    """Run a search in a store of its own; a row of the table."""
    reports: list[tuple[float, Progress]] = []
    with tempfile.TemporaryDirectory() as folder, Store.open(f"sqlite:///{Path(folder) / 'store.db'}") as store:
        setup = set_up_new(config)
        register(setup, store)
        started = time.perf_counter()
        watch = Observer(on_progress=lambda progress: reports.append((time.perf_counter() - started, progress)))
        table = execute(setup, store, watch)
        engine = engine_fingerprint(config.model, config.engine)
        splits = [split.fingerprint for split in setup.splits("search")]
        full = store.evaluations(FULL_MODEL, setup.facts.fingerprint, engine, splits)
    seconds, last = reports[-1]
    assert last.best is not None
    found = next(since for since, progress in reports if progress.best == last.best)
    unit = sum(one.seconds or 0.0 for one in full)
    best = next(entry for entry in table.entries if entry.label == BEST_LABEL)
    test = statistics.mean(score.score or 0.0 for score in best.scores if score.split == "test")
    return (
        f"| {config.seed} | {last.done} | {last.evaluated} | {seconds:.1f} | {seconds / last.done:.2f} "
        f"| {seconds / last.done / unit:.2f} | {found:.1f} | {100 * last.best[1]:.1f} | {100 * test:.1f} |"
    )


if __name__ == "__main__":
    main()
