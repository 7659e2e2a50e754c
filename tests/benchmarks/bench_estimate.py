"""Sets beside each other what `plan` says of an evaluation on this machine, and what it takes. Run it by hand.

    python tests/benchmarks/bench_estimate.py [--run configs/runs/demo.yaml ...] [--evaluations 5]

Random candidates of each run's first phase, one after another, on its search prompts, by one worker. The ratio
is that of the processor's time to the estimate's range: other processes may be running. Medians.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import numpy as np
from timed_search import unrepaired

from moevolve.search.config.files import load_run_config
from moevolve.search.config.run import RunConfig
from moevolve.search.estimate.estimate import EstimateRequest, estimate
from moevolve.search.running.set_up import set_up
from moevolve.workers.messages import EvaluationRequest
from moevolve.workers.worker import EvaluationWorker

RUNS = Path(__file__).parents[2] / "configs" / "runs"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, nargs="+", default=[RUNS / "demo.yaml", RUNS / "nanomoe-demo.yaml"])
    parser.add_argument("--evaluations", type=int, default=5)
    options = parser.parse_args()
    for run in options.run:
        config = unrepaired(load_run_config(run))
        estimated = estimate(EstimateRequest(config, cpu=True)).devices[0].phases[0].scoring
        taken = statistics.median(seconds(config, options.evaluations))
        print(
            f"  {run.stem}: {taken:.3f} s an evaluation, estimated {estimated.least:.3f} to {estimated.most:.3f} s: "
            f"{taken / estimated.most:.2f} to {taken / estimated.least:.2f} times"
        )


def seconds(config: RunConfig, evaluations: int) -> list[float]:
    """The processor's, of candidates one after another."""
    setup = set_up(config, "bench-1")
    splits = setup.prepared["search"]
    worker, rng = EvaluationWorker(config.model, config.engine), np.random.default_rng(0)
    if setup.space.recipe is not None:
        raise SystemExit(f"{config.name}: a kind of genome that is calibrated isn't measured here")
    taken = []
    for _ in range(evaluations + 1):
        edit = setup.space.sample(rng, config.phases[0]).genome.express()
        began = time.process_time()
        reply = worker.evaluate(EvaluationRequest(edit, tuple(split.ref for split in splits)), splits)
        taken.append(time.process_time() - began)
        if reply.failure is not None:
            raise SystemExit(f"{config.name}: {reply.failure}")
    return taken[1:]


if __name__ == "__main__":
    main()
