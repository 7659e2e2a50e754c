"""How much sooner our presets are as good as the search of EEP's authors ends.

    python tests/benchmarks/bench_search.py [--beds facts text] [--presets repaired counts prune] [--seeds 0]

Every preset keeps a quarter of the expert neurons of a demo's model, as 8 of 32 experts or, with `counts`, as narrower
ones, with the same two workers and the same data, in a store of its own. Seconds begin with the launch: loading of
workers, calibrations and repairs are in them, the final table isn't. A preset is as good once its best individual so
far, by `search`, has the mean score on `test` that the authors' winner has.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from statistics import fmean
from typing import Any

import bench

import moevolve
from moevolve.evaluators.scales import SCALES
from moevolve.search.config.files import parse_run_config, with_preset
from moevolve.search.loop.final_table import BEST_LABEL

CONFIGS = bench.ROOT / "configs"
FACTS = {"name": "demo-span", "counts": {"search": 400, "dev": 300, "test": 1000}}
BEDS: dict[str, tuple[Path, list[dict[str, Any]]]] = {
    "facts": (CONFIGS / "demo" / "fine", [FACTS]),
    "text": (CONFIGS / "demo" / "text", bench.DOMAINS["tasks"]),
}
AUTHORS = "authors"
QUARTER = {"counts": {"experts": None, "neuron_share": 0.25}}
"""Genomes of the presets for kinds other than `eep`."""


def main() -> None:
    parser = bench.arguments(__doc__)
    parser.add_argument("--beds", nargs="+", choices=BEDS, default=list(BEDS))
    parser.add_argument("--presets", nargs="+", default=["repaired", "counts", "prune"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    options = parser.parse_args()
    print("| bed | seed | preset | individuals | seconds | `test` | as good as `authors` after, s | sooner |")
    print("|---|---:|---|---:|---:|---:|---:|---:|")
    for bed in options.beds:
        for seed in options.seeds:
            whole, goal = search(bed, AUTHORS, seed, None)
            for preset in options.presets:
                search(bed, preset, seed, (whole, goal))


def search(bed: str, preset: str, seed: int, authors: tuple[float, float] | None) -> tuple[float, float]:
    """Run one search and print its row; its seconds, and its winner's score on `test`.

    Args:
        authors: The same of the authors' search; None for that search itself.
    """
    model, tasks = BEDS[bed]
    data = {
        "name": "search",
        "seed": seed,
        "preset": preset,
        "model": {"path": str(model), "dtype": "float32", "device": "cpu"},
        "tasks": tasks,
        "genome": QUARTER.get(preset, {"experts": 8}),
        "window": 4,
        "workers": {"count": 2, "num_cpus": 1},
        "engine": {"threads": 1},
        "final": {"test": True, "random_baselines": 0},
    }
    config = parse_run_config(with_preset(data, "bench_search"), "bench_search")
    reports: list[tuple[float, moevolve.Progress]] = []
    with tempfile.TemporaryDirectory() as folder:
        store = f"sqlite:///{Path(folder) / 'store.db'}"
        started = time.perf_counter()
        watch = moevolve.Observer(on_progress=lambda each: reports.append((time.perf_counter() - started, each)))
        table = moevolve.launch(config, store=store, observer=watch, progress=False)
        winner = next(entry for entry in table.entries if entry.label == BEST_LABEL)
        tested = [each for each in winner.scores if each.split == "test"]
        score = fmean(each.score or 0.0 for each in tested)
        shown = SCALES[tested[0].scale].text(score)
        seconds, last = reports[-1]
        sooner = "| |" if authors is None else sooner_than(authors, reports, [each["name"] for each in tasks], store)
    print(f"| {bed} | {seed} | {preset} | {last.done} | {seconds:.0f} | {shown} | {sooner}", flush=True)
    return seconds, score


def sooner_than(
    authors: tuple[float, float], reports: list[tuple[float, moevolve.Progress]], tasks: list[str], store: str
) -> str:
    """Cells of a row: when the best individual so far has the authors' score on `test`, and their seconds by that."""
    seconds, goal = authors
    tried = set()
    for since, progress in reports:
        if progress.best is None or progress.best[0] in tried:
            continue
        best = progress.best[0]
        tried.add(best)
        (found,) = moevolve.evaluate(store, f"search:{best}", tasks=tasks).models
        scores = [each.score for each in found.scores]
        if fmean(score or 0.0 for score in scores) >= goal:
            return f"{since:.0f} | {seconds / since:.1f} |"
    return "never | |"


if __name__ == "__main__":
    main()
