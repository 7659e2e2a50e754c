"""Which strategy finds the best experts to keep where there are many: a planted landscape instead of a model.

    python tests/benchmarks/bench_planted.py [--layers 48] [--experts 128] [--keep 64] [--domains 3] [--seeds 3]
        [--evaluations 100 300 1000] [--methods surrogate ...]

`tests/labs/planted.py` has the landscape. Fitness is the mean of `exp(-gap)` over the domains, the gap being
`log(perplexity / full)`. The table has the gap on `test`, the mean over domains and over one model per seed, of the
individual that is best on `search` among the first so many, and its difference with the standard error from the first
one, which is REAP's choice.
"""

from __future__ import annotations

import time
from typing import Any

import bench
import numpy as np
from planted import PlantedModel
from search_samples import mixtral
from strategy_lab import asked_and_told

from moevolve.search.config.run import RunConfig
from moevolve.search.strategies.phased import make_strategy
from moevolve.search.strategies.schedule import make_schedule
from moevolve.store.records import IndividualRecord

SUBSETS = {"kind": "prune", "initial": 16, "init": ["reap", "energy", "random"]}
METHODS: dict[str, dict[str, Any]] = {
    "random subsets": SUBSETS,
    "evolution": SUBSETS,
    "surrogate": SUBSETS | {"strategy": "surrogate"},
}


def searched(model: PlantedModel, phase: dict[str, Any], keep: int, evaluations: int, seed: int) -> np.ndarray:
    """Search `model`; return fitness on `search` and the gap on `test` of all individuals: float64 [evaluations, 2]."""
    config = RunConfig.model_validate(
        {
            "name": "planted",
            "seed": seed,
            "model": {"path": "planted"},
            "tasks": [{"name": "one"}],
            "genome": {"groups": "per_layer", "experts": keep, "active": min(8, keep)},
            "phases": [phase | {"evaluations": evaluations, "initial": min(phase["initial"], evaluations)}],
            "window": 8,
        }
    )
    facts = mixtral(model.layers, model.experts, 8)
    space, schedule = config.space(facts).calibrated(model.calibration), make_schedule(config)
    found: list[tuple[float, float]] = []

    def score(one: IndividualRecord) -> tuple[float, float]:
        edit = space.from_bytes(one.genome).express()
        fitness = float(np.exp(-model.gaps(edit, "search")).mean())
        found.append((fitness, float(model.gaps(edit).mean())))
        return fitness, 0.0

    asked_and_told(lambda: make_strategy(config, space, schedule), space, schedule, score)
    return np.array(found)


def main() -> None:
    parser = bench.arguments(__doc__)
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--keep", type=int, default=64)
    parser.add_argument("--domains", type=int, default=3)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--evaluations", type=int, nargs="+", default=[100, 300, 1000])
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    options = parser.parse_args()
    print("| method | evaluations | gap on test | below the first one's by | seconds |\n|---|---:|---:|---:|---:|")
    for name in options.methods:
        phase, most = METHODS[name], max(options.evaluations)
        if "random" in name:
            phase = phase | {"initial": most}
        began, courses = time.perf_counter(), []
        for seed in range(options.seeds):
            model = PlantedModel(options.layers, options.experts, options.domains, seed)
            courses.append(searched(model, phase, options.keep, most, seed))
        seconds = (time.perf_counter() - began) / options.seeds
        for count in options.evaluations:
            best = np.array([course[course[:count, 0].argmax(), 1] for course in courses])
            gained = np.array([course[0, 1] for course in courses]) - best
            error = gained.std(ddof=1) / np.sqrt(len(gained)) if len(gained) > 1 else np.nan
            print(
                f"| {name} | {count} | {best.mean():.4f} | {gained.mean():.4f} +- {error:.4f} | {seconds:.0f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
