"""Measures what a search costs: the authors' way of evaluating, ours, and a plain forward pass. Run it by hand.

    python tests/benchmarks/bench_search.py [--run configs/runs/demo.yaml] [--seeds 0 1] [--json FILE]

Three questions, answered for the model and task of a run file (a Mixtral):

1. What does an evaluation cost? The authors' way (`authors_way.py`: whole state dict, `generate`, all prompts, nothing
   kept; one process, all cores), one plain forward pass of the full model over the search split (the unit), and our
   searches: wall time over individuals, with all shortcuts and with each one off.
2. When is a held-out score reached? A search whose candidates are evaluated in the authors' way, one after another
   (`preset: authors`: their operators, budget and groups), against the run file's, which may
   repair (what calibrations take is counted): the score on `test` of the best individual so far, mean over seeds,
   against seconds. Since candidates score the same either way (a test says so), the first one's population is found
   with our workers and charged what the authors' way takes per pruning and per merging candidate, measured before and
   after.
3. What does each shortcut save? Evaluations with one of them off, and shorter searches, in turns; see
   `shortcut_shares.py`.

Workers are loaded before any clock starts. Everything is timed in one run, and medians count.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from authors_way import AuthorsWay
from rich.console import Console
from rich.table import Table
from shortcut_shares import evaluation_shares, search_shares
from timed_search import TimedSearch, run_timed

from moevolve.search.config.files import load_run_config, preset
from moevolve.search.config.run import RunConfig
from moevolve.search.genomes.capacity.space import CapacitySpace
from moevolve.search.genomes.repaired import RepairedSpace
from moevolve.search.loop.setup import SearchSetup
from moevolve.search.running.launch import set_up_new
from moevolve.workers.contract.messages import EvaluationRequest

LABELS = {"theirs": "authors' way", "ours": "moevolve"}


@dataclass(frozen=True, slots=True)
class UnitCosts:
    """Seconds, medians.

    Attributes:
        forward: a plain forward pass of the full model over the search split.
        pruning, merging: an evaluation in the authors' way.
    """

    forward: float
    pruning: float
    merging: float


def main() -> None:
    options = parse()
    console = Console()
    torch.set_num_threads(options.threads)
    base = load_run_config(Path(options.run))
    authors = with_settings(base, authors_settings(base))
    setup = set_up_new(authors)
    yardstick = AuthorsWay(base.model, base.engine, options.rows)
    samples = [measure_units(yardstick, setup, options.repeats)]
    theirs = [run_timed(with_settings(authors, {"seed": seed})) for seed in options.seeds]
    ours = [run_timed(with_settings(base, {"seed": seed})) for seed in options.seeds]
    samples.append(measure_units(yardstick, setup, options.repeats))
    units = UnitCosts(*(statistics.mean(getattr(s, f.name) for s in samples) for f in fields(UnitCosts)))
    theirs = [charged(search, units) for search in theirs]
    result = summary(units, theirs, ours)
    if options.shares:
        result["evaluation_shares"] = evaluation_shares(base, options.repeats)
        result["search_shares"] = search_shares(base, options.short, options.repeats)
    result["machine"] = machine(options.threads)
    show(console, base, result)
    if options.json:
        Path(options.json).write_text(json.dumps(result, indent=2) + "\n")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", default="configs/runs/demo.yaml")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--short", type=int, default=120, help="evaluations of the searches of question 3")
    parser.add_argument("--rows", type=int, default=64, help="prompts per batch of the authors' way")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of the authors' way")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--no-shares", dest="shares", action="store_false", help="skip question 3")
    parser.add_argument("--json", help="write the numbers to this file too")
    return parser.parse_args()


def authors_settings(base: RunConfig) -> dict[str, Any]:
    """Their search of what a run file searches; its final scores are taken as the run file says."""
    found = preset("authors", {}, "bench_search")
    space = set_up_new(base).space
    assert isinstance(space, RepairedSpace) and isinstance(space.inner, CapacitySpace)
    # They keep whole experts: as many as have the neurons of the run's share.
    genome = found["genome"] | {"experts": space.inner.fewest, "router_space": space.inner.router_space}
    settings = {"strategy": {"kind": "evolution"}, "genome": genome, "stop_at_recovery": None}
    return {key: found[key] for key in ("tie_break", "phases")} | settings


def with_settings(config: RunConfig, settings: dict[str, Any]) -> RunConfig:
    return RunConfig.model_validate(config.model_dump(mode="json") | settings)


def measure_units(yardstick: AuthorsWay, setup: SearchSetup, repeats: int) -> UnitCosts:
    """Median seconds of each kind of work, in turns; random candidates."""
    split = setup.prepared["search"][0]
    rng = np.random.default_rng(0)
    times: dict[str, list[float]] = {"forward": [], "pruning": [], "merging": []}
    for repeat in range(repeats + 1):
        pruned = setup.space.sample(rng, setup.config.phases[0]).genome
        merged = setup.space.breed(rng, setup.config.phases[1], (pruned,)).genome
        seconds = {"forward": yardstick.plain_forward(split)}
        for name, genome in (("pruning", pruned), ("merging", merged)):
            request = EvaluationRequest(genome.express(), (split.ref,))
            seconds[name] = yardstick.evaluate(request, (split,)).seconds
        if repeat:  # the first makes the model and warms up
            for name, value in seconds.items():
                times[name].append(value)
    return UnitCosts(**{name: statistics.median(values) for name, values in times.items()})


def charged(search: TimedSearch, units: UnitCosts) -> TimedSearch:
    """A search as if its individuals had been evaluated one by one in the authors' way."""

    def cost(done: int) -> float:
        pruned = min(done, search.prunings)
        return pruned * units.pruning + (done - pruned) * units.merging

    incumbents = tuple(replace(each, seconds=cost(each.place + 1)) for each in search.incumbents)
    return replace(search, wall=cost(search.individuals), evaluated=search.individuals, incumbents=incumbents)


def reached(searches: list[TimedSearch], score: float) -> float | None:
    """Seconds until the mean held-out score over seeds is at least `score`; None if it never is."""
    moments = sorted({each.seconds for search in searches for each in search.incumbents})
    means = ((moment, statistics.mean(search.held_out_at(moment) for search in searches)) for moment in moments)
    return next((moment for moment, mean in means if mean >= score - 1e-9), None)


def summary(units: UnitCosts, theirs: list[TimedSearch], ours: list[TimedSearch]) -> dict[str, Any]:
    """The numbers of questions 1 and 2."""
    end = statistics.mean(search.incumbents[-1].held_out for search in theirs)
    goals = sorted({round(share * end, 4) for share in (0.9, 0.95, 1.0)})
    spent = statistics.mean(search.wall for search in theirs)
    return {
        "units": {field.name: getattr(units, field.name) for field in fields(units)},
        "theirs": costs(theirs, units),
        "ours": costs(ours, units),
        "goals": [{"score": goal, "theirs": reached(theirs, goal), "ours": reached(ours, goal)} for goal in goals],
        "whole": {"theirs": spent, "ours": reached(ours, goals[-1])},
        "curves": {"theirs": curve(theirs), "ours": curve(ours)},
    }


def curve(searches: list[TimedSearch]) -> list[tuple[float, float, float]]:
    """Seconds, and the mean and standard deviation over seeds of the held-out score then, at every change."""
    moments = sorted({each.seconds for search in searches for each in search.incumbents})
    scores = [[search.held_out_at(moment) for search in searches] for moment in moments]
    return [
        (moment, statistics.mean(values), statistics.stdev(values) if len(values) > 1 else 0.0)
        for moment, values in zip(moments, scores, strict=True)
    ]


def costs(searches: list[TimedSearch], units: UnitCosts) -> dict[str, float]:
    wall = statistics.mean(search.wall for search in searches)
    individuals = searches[0].individuals
    return {
        "individuals": individuals,
        "evaluated": statistics.mean(search.evaluated for search in searches),
        "wall": wall,
        "per_individual": wall / individuals,
        "forwards": wall / individuals / units.forward,
        "best": statistics.mean(search.best for search in searches),
        "held_out": statistics.mean(search.incumbents[-1].held_out for search in searches),
    }


def machine(threads: int) -> dict[str, Any]:
    return {
        "processor": platform.processor() or platform.machine(),
        "threads": threads,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
    }


def spared(theirs: float, ours: float | None) -> str:
    found = "never" if ours is None else f"after {ours:.1f} s ({theirs / ours:.1f}x less)"
    return f"the authors' way after {theirs:.1f} s, by moevolve {found}"


def show(console: Console, base: RunConfig, result: dict[str, Any]) -> None:
    table = Table(title=f"{base.tasks[0].name}, {base.genome.kind}: cost of a search")
    for column in ("", "individuals", "evaluated", "wall s", "s per individual", "plain forwards", "search", "test"):
        table.add_column(column, justify="right" if column else "left")
    for name, label in LABELS.items():
        row = result[name]
        table.add_row(
            label,
            f"{row['individuals']}",
            f"{row['evaluated']:.0f}",
            f"{row['wall']:.1f}",
            f"{row['per_individual']:.3f}",
            f"{row['forwards']:.2f}",
            f"{100 * row['best']:.1f}",
            f"{100 * row['held_out']:.1f}",
        )
    console.print(table)
    console.print(f"plain forward of the full model over the search split: {result['units']['forward']:.3f} s")
    for goal in result["goals"]:
        console.print(f"{100 * goal['score']:.1f} on test is first reached by {spared(goal['theirs'], goal['ours'])}")
    console.print(f"what it ends with, counting all that it takes: {spared(**result['whole'])}")
    for what in ("evaluation", "search"):
        for name, ratio in result.get(f"{what}_shares", {}).items():
            console.print(f"seconds of {'an' if what == 'evaluation' else 'a'} {what} with {name}: {ratio:.2f}")
    console.print(", ".join(f"{key} {value}" for key, value in result["machine"].items()), highlight=False)


if __name__ == "__main__":
    main()
