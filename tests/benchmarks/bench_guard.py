"""The guard of `moevolve shrink` on simulated loops, and on candidates of the demo's mixtures of experts.

    python tests/benchmarks/bench_guard.py [--good 10] [--bad 5] [--loops]

First, models are simulated by whether each of their answers is a loop: the full model in 3.6 % of the prompts, a bad
candidate in 7.2 %, and a good one in 3.6 %, independently or on the same prompts as far as a correlation says. A table
shows which share of them is refused by the number of prompts, and after how many prompts the answers end on average.
With `--loops` that is all.

Candidates are drawn: the experts that the tasks use most, pruned, repaired or merged with noise, and random ones of
which few are kept. A good one has `KEPT` or more of the full model's accuracy in every one of the six tasks, on 100
`test` rows; a bad one has less than half of it on their average. What is between is left out. The guard is the one of
the command, with its limits; it reads these rows, and those domains of the general set that the full model knows.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import torch

from moevolve.evaluators.preparation.prepare import prepare_split
from moevolve.evaluators.preparation.registry import load_task
from moevolve.search.shrink.guard import Checks, Probe, check_edit, general_set
from moevolve.search.shrink.loops import ALPHA, discordant, is_clear, looks_at, p_value
from moevolve.search.shrink.request import GUARD_PROMPTS, ShrinkRequest
from moevolve.workers.contract.edits import Calibration, Edit, IdentityEdit
from moevolve.workers.contract.fitting import FitRows, RowsRecipe
from moevolve.workers.contract.messages import EvaluationRequest
from moevolve.workers.contract.settings import EngineConfig, ModelConfig
from moevolve.workers.methods.eep.edit import EepEdit
from moevolve.workers.methods.repair.edit import RepairedEdit, RepairRecipe
from moevolve.workers.worker import EvaluationWorker

DEMO = Path(__file__).parents[2] / "configs" / "demo"
TASKS = ("calendar", "count", "kin", "compare", "relation", "span")
ROWS = 100
KEPT = 0.9
REQUEST = ShrinkRequest("model", experts="50%", data=("chats.jsonl",))
LEAST = 46
"""Fewest prompts of one task and the general set."""
LOOPS = 0.036
SIMULATED = 2000


class Bed:
    """One of the demo's models, with candidates."""

    def __init__(self, name: str) -> None:
        model = ModelConfig(str(DEMO / name), device="cpu", dtype="float32")
        self.worker = EvaluationWorker(model, EngineConfig(threads=torch.get_num_threads()))
        self.splits = {task: prepare_split(load_task(f"demo-{task}"), "test").head(ROWS) for task in TASKS}
        measured = [prepare_split(load_task(f"demo-{task}"), "calibration") for task in TASKS]
        self.rows = FitRows.of(Calibration.from_bytes(self.worker.calibrate(RowsRecipe(16384), tuple(measured))).arrays)
        usages = [self.worker.analyse(IdentityEdit(), split, 4096) for split in measured]
        self.used = np.sum([[layer.weights for layer in usage.routed] for usage in usages], axis=0)
        self.active = int(self.worker.resident.model.config.num_experts_per_tok)
        self.full = self.accuracies(IdentityEdit())
        self.general = general_set()

    def accuracies(self, edit: Edit) -> Mapping[str, float]:
        """Accuracy of a candidate by task."""
        splits = tuple(self.splits.values())
        reply = self.worker.evaluate(EvaluationRequest(edit, tuple(split.ref for split in splits)), splits)
        assert reply.failure is None, reply.failure
        return {name: reply.results[split.fingerprint].score for name, split in self.splits.items()}

    def candidates(self, bad: bool) -> Iterator[tuple[str, Edit]]:
        """Endless candidates of either sort, with their names."""
        seed, experts = 0, self.used.shape[1]
        while True:
            rng = np.random.default_rng([seed, bad])
            seed += 1
            if bad:
                share = (1 / 8, 1 / 4)[seed % 2]
                order = rng.permuted(np.tile(np.arange(experts), (len(self.used), 1)), axis=1)
                edit = self._kept(order, share, 0, rng)
                yield f"{edit.retained} random experts", edit
                continue
            # Noise in the order, so that candidates differ.
            order = np.argsort(-self.used * rng.lognormal(0, 0.2, self.used.shape), axis=1)
            share = (7 / 8, 3 / 4, 5 / 8)[seed % 3]
            yield f"pruned, {share:.0%}", self._kept(order, share, 0, rng)
            yield f"merged with noise, {share:.0%}", self._kept(order, share, 0.03, rng)
            yield f"repaired, {share:.0%}", RepairedEdit(self._kept(order, share, 0, rng), RepairRecipe(), self.rows)

    def _kept(self, order: np.ndarray, share: float, noise: float, rng: np.random.Generator) -> EepEdit:
        count = max(self.active, round(share * order.shape[1]))
        matrices = np.eye(order.shape[1], dtype=np.float32)[np.sort(order[:, :count], axis=1)]
        noisy = matrices + noise * rng.normal(size=matrices.shape)
        return EepEdit(matrices, noisy, self.active)

    def checks(self, edit: Edit, scores: Mapping[str, float]) -> Checks:
        """What the guard finds."""
        probes = [self._probe(name, scores) for name in TASKS]
        return check_edit(self.worker, edit, [*probes, *self.general], REQUEST)

    def _probe(self, name: str, scores: Mapping[str, float]) -> Probe:
        judged = prepare_split(load_task(f"demo-{name}@agreement"), "test").head(ROWS)
        return Probe(name, judged, scores[name] / self.full[name], graded=True)


def report(bed: Bed, wanted: int, bad: bool) -> None:
    """Check candidates of a sort until there are as many as wanted, and print what the guard says of them."""
    faults, found, alarms = Counter[str](), 0, 0
    worst = {"loops": 0.0, "perplexity": 1.0}
    for name, edit in bed.candidates(bad):
        scores = bed.accuracies(edit)
        kept = [scores[task] / bed.full[task] for task in TASKS]
        mean, least = sum(kept) / len(kept), min(kept)
        if (mean >= 0.5) if bad else (least < KEPT):
            continue
        checks, loops = bed.checks(edit, scores)
        said = [f"{check.task} {fault}" for check in checks for fault in check.faults]
        said += [] if loops.fault is None else [f"all prompts {loops.fault}"]
        worst["loops"] = max(worst["loops"], loops.shrunk / loops.prompts)
        worst["perplexity"] = max([worst["perplexity"], *(check.perplexity or np.inf for check in checks)])
        faults.update(_limit(fault) for fault in said)
        alarms += bool(said)
        print(
            f"  {name}: {mean:.1%} of the full accuracy, {least:.1%} in the worst task; {'; '.join(said) or 'passes'}",
            flush=True,
        )
        found += 1
        if found == wanted:
            break
    sort, by = "bad" if bad else "good", dict(faults) or "no limit"
    print(f"  {found} {sort} candidates, {alarms} refused, by {by}", flush=True)
    print(f"  most loops {worst['loops']:.0%}, largest perplexity {worst['perplexity']:.2f} times", flush=True)


def _limit(fault: str) -> str:
    return next(what for what in ("repeats", "lost", "perplexity", "score") if what in fault)


def simulate() -> None:
    """Print how many simulated candidates are refused, by the number of prompts."""
    print("most prompts | correlation | doubled: refused, prompts answered | equal: refused, answered", flush=True)
    for prompts in (50, 140, 280, GUARD_PROMPTS, 1000, 2000):
        for correlation in (0.0, 0.3, 0.6):
            cells = []
            for shrunk in (2 * LOOPS, LOOPS):
                rng = np.random.default_rng([prompts, round(100 * correlation)])
                drawn = [refused(prompts, shrunk, correlation, rng) for _ in range(SIMULATED)]
                cells.append("{:.1%}, {:.0f}".format(*np.mean(drawn, axis=0)))
            print(f"{prompts} | {correlation} | {' | '.join(cells)}", flush=True)


def refused(prompts: int, shrunk: float, correlation: float, rng: np.random.Generator) -> tuple[bool, int]:
    """Whether a candidate with this share of loops is refused, and after how many prompts."""
    both = LOOPS * shrunk + correlation * (LOOPS * (1 - LOOPS) * shrunk * (1 - shrunk)) ** 0.5
    kinds = rng.choice(4, size=prompts, p=[both, shrunk - both, LOOPS - both, 1 - shrunk - LOOPS + both])
    pairs = [(kind in (0, 2), kind in (0, 1)) for kind in kinds.tolist()]
    looks = looks_at(prompts, min(LEAST, prompts))
    until = next((look for look in looks if is_clear(*discordant(pairs[:look]), look)), prompts)
    return p_value(*discordant(pairs[:until])) <= ALPHA, until


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--good", type=int, default=10, help="good candidates of each model")
    parser.add_argument("--bad", type=int, default=5, help="bad candidates of each model")
    parser.add_argument("--loops", action="store_true", help="simulate loops, and stop")
    options = parser.parse_args()
    simulate()
    if options.loops:
        return
    for name in ("model", "fine"):
        bed = Bed(name)
        print(f"{name}: the full model has {sum(bed.full.values()) / len(TASKS):.1%} on average")
        untouched, _ = bed.checks(IdentityEdit(), bed.full)
        assert not any(check.faults for check in untouched)
        known = {check.task for check in untouched if check.known}
        print(f"  untouched: passes; {len(known)} of {len(untouched)} domains are known", flush=True)
        bed.general = [probe for probe in bed.general if probe.name in known]
        report(bed, options.good, bad=False)
        report(bed, options.bad, bad=True)


if __name__ == "__main__":
    main()
