"""Measures whether candidates that share passes (`engine.population`) are evaluated faster. Run it by hand.

    python tests/benchmarks/bench_population.py [--task demo-span] [--device cpu] [--threads 1] [--examples 128]

For every size it prints candidates per second and the ratio to a population of 1: with the same `engine.batch_tokens`,
and with so many times as many, which a population of 1 can have as well. Settings take turns, round by round, so that a
machine that slows down does so for all; medians of rounds. A size pays only if it beats a population of 1 with more
batch tokens, too, which `engine.population: auto` doesn't look at. Any checkpoint of experts will do (`--model`).
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from moevolve.evaluators.prepare import prepare_split
from moevolve.evaluators.registry import load_task
from moevolve.evaluators.runner import run_split
from moevolve.evaluators.types import PreparedSplit
from moevolve.workers.config import EngineConfig, ModelConfig
from moevolve.workers.edits.eep import EepEdit
from moevolve.workers.generation import GenerationEngine, configure_runtime
from moevolve.workers.population import Population, Seat
from moevolve.workers.resident import ResidentModel

DEMO = Path(__file__).parents[2] / "configs" / "demo" / "model"


@dataclass(frozen=True)
class Setting:
    """How candidates are evaluated."""

    population: int
    batch_tokens: int


def main() -> None:
    options = parsed()
    configure_runtime(options.threads)
    model = ModelConfig(str(options.model), dtype=options.dtype, device=options.device)
    resident = ResidentModel.load(model)
    split = prepare_split(load_task(options.task).with_counts({"search": options.examples}), "search")
    plain = [Setting(1, options.batch_tokens * times) for times in (1, *options.sizes)]
    shared = [Setting(size, options.batch_tokens * times) for size in options.sizes for times in (1, size)]
    count = max(options.sizes) * options.parties
    for kind in ("prune", "merge"):
        edits = candidates(resident, count, kind)
        rates = measured(resident, split, edits, [*plain, *shared], options.rounds)
        report(kind, options, rates)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=DEMO)
    parser.add_argument("--task", default="demo-span")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--examples", type=int, default=128)
    parser.add_argument("--batch-tokens", type=int, default=1024)
    parser.add_argument("--sizes", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--parties", type=int, default=1, help="candidates per round, in multiples of the largest size")
    parser.add_argument("--rounds", type=int, default=5)
    return parser.parse_args()


def candidates(resident: ResidentModel, count: int, kind: str) -> list[EepEdit]:
    """Random ones with half of the experts, each layer's of its own."""
    rng = np.random.default_rng(0)
    layers, experts = len(resident.layers), resident.layers[0].count
    made = []
    for _ in range(count):
        kept = np.stack([np.sort(rng.permutation(experts)[: experts // 2]) for _ in range(layers)])
        mapping = np.eye(experts, dtype=np.float32)[kept]
        noise = rng.normal(0, 0.065, (2, *mapping.shape)).astype(np.float32)
        merging = kind == "merge"
        made.append(EepEdit(mapping + noise[0] * merging, mapping + noise[1] * merging, min(2, experts // 2)))
    return made


def measured(
    resident: ResidentModel, split: PreparedSplit, edits: Sequence[EepEdit], settings: list[Setting], rounds: int
) -> dict[Setting, float]:
    """Candidates per second."""
    engines = {
        setting: GenerationEngine(
            resident.model,
            resident.tokenizer,
            EngineConfig(batch_tokens=setting.batch_tokens, population=setting.population),
        )
        for setting in settings
    }
    seconds: dict[Setting, list[float]] = {setting: [] for setting in settings}
    for _ in range(rounds + 1):
        for setting, engine in engines.items():
            started = time.perf_counter()
            evaluate(resident, engine, split, edits)
            seconds[setting].append(time.perf_counter() - started)
    # The first round warms caches up.
    return {setting: len(edits) / statistics.median(taken[1:]) for setting, taken in seconds.items()}


def evaluate(resident: ResidentModel, engine: GenerationEngine, split: PreparedSplit, edits: Sequence[EepEdit]) -> None:
    """All candidates once, as a worker does it."""
    config = engine.config
    if config.population == 1:
        for edit in edits:
            with resident.edited(edit):
                run_split(engine, split)
        return

    def work(own: GenerationEngine) -> None:
        run_split(own, split)

    population = Population(resident, engine, config.population, config.population_memory_mb << 20)
    for party in population.parties(edits):
        population.run([Seat(edits[place], work) for place in party])


def report(kind: str, options: argparse.Namespace, rates: dict[Setting, float]) -> None:
    print(f"{kind}: {options.task}, {options.examples} examples, {options.device}, {options.threads} threads")
    print(f"{'population':>10} {'batch tokens':>12} {'candidates/s':>12} {'ratio':>6} {'to 1 with as many':>17}")
    one = rates[Setting(1, options.batch_tokens)]
    for setting, rate in rates.items():
        same = rates[Setting(1, setting.batch_tokens * setting.population)] if fits(setting, options) else None
        alike = "" if same is None else f"{rate / same:17.2f}"
        print(f"{setting.population:10} {setting.batch_tokens:12} {rate:12.2f} {rate / one:6.2f} {alike}")


def fits(setting: Setting, options: argparse.Namespace) -> bool:
    """Whether a population of 1 was measured with as many tokens per pass."""
    return setting.population > 1 and setting.batch_tokens == options.batch_tokens


if __name__ == "__main__":
    main()
