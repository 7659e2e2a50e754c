"""The rows of a comparison: every contestant's scores over seeds, what they cost, and whether differences are real."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from statistics import fmean, stdev

import numpy as np

from moevolve.evaluators.types import SPLITS, Split
from moevolve.search.calibrating import stored_calibration
from moevolve.search.comparing.run import Outcome
from moevolve.search.comparing.significance import Outcomes, Significance, paired_test, weighted_interval
from moevolve.search.finalise import BEST_LABEL, FULL_LABEL, Contestant
from moevolve.store.repository import Store
from moevolve.workers.config import engine_fingerprint


@dataclass(frozen=True, slots=True)
class Measured:
    """A score in [0, 1], mean over seeds.

    Attributes:
        task: which; `` for the weighted mean over all tasks.
        split: on which it was measured.
        score: mean over seeds.
        low, high: 95 % interval over examples, of outcomes averaged over seeds; None for means over random draws, and
            over several seeds of a held-out task.
        spread: standard deviation over seeds, or over draws; None for a single model.
    """

    task: str
    split: Split
    score: float
    low: float | None
    high: float | None
    spread: float | None


@dataclass(frozen=True, slots=True)
class Row:
    """One contestant at one budget on one search task (or several in one fitness).

    Attributes:
        task, budget, method: labels of the comparison; method is `full model` for the unedited one.
        contestant: `best found`, `unsearched start`, `random pruning, 20 draws` ...
        baseline: whether it is a one-shot baseline.
        seeds: how many searches it is a mean of.
        scores: per split, the mean over tasks first, then (if there are several) each task's, and held-out ones'.
        parameters, active_parameters: of the model, per token the second; means over seeds.
        evaluations: different models evaluated on `search` or `dev`, mean over seeds.
        seconds: workers' time for them and for what the method starts from, mean over seeds.
        against_full, against_baseline: paired tests of `headline` against the full model, and against the best
            baseline; None where there is nothing to pair.
        refs: the individuals, one per seed.
        failure: why there is nothing else, or why seeds are missing or score nothing on a split.
        outcomes: what the paired tests are made on; empty once they are.
    """

    task: str
    budget: str
    method: str
    contestant: str
    baseline: bool
    seeds: int = 0
    scores: tuple[Measured, ...] = ()
    parameters: float = 0.0
    active_parameters: float = 0.0
    evaluations: float = 0.0
    seconds: float = 0.0
    against_full: Significance | None = None
    against_baseline: Significance | None = None
    refs: tuple[str, ...] = ()
    failure: str | None = None
    outcomes: tuple[Outcomes, ...] = field(default=(), repr=False)

    def score(self, split: Split, task: str = "") -> Measured | None:
        """The score on a split; of all tasks together unless one is named."""
        return next((each for each in self.scores if (each.split, each.task) == (split, task)), None)

    @property
    def headline(self) -> Measured | None:
        """The score that counts: on `test`, or on `search` where that wasn't scored."""
        return self.score("test") or self.score("search")


def comparison_rows(outcomes: Sequence[Outcome], store: Store) -> list[Row]:
    """Rows in the order of the comparison's cells, each (task, budget) begun by the full model."""
    rows: list[Row] = []
    for (task, budget), group in groupby(outcomes, key=lambda each: (each.cell.task, each.cell.budget)):
        here = list(group)
        methods = list(dict.fromkeys(each.cell.method for each in here))
        found = _full(here, store)
        for method in methods:
            found += _method([each for each in here if each.cell.method == method], store)
        rows += _tested([replace(row, task=task, budget=budget) for row in found])
    return rows


def _full(outcomes: Sequence[Outcome], store: Store) -> list[Row]:
    """The unedited model; every search scored the same one, so the first that got so far will do."""
    for outcome in outcomes:
        for contestant in outcome.report.contestants if outcome.report is not None else ():
            if contestant.label == FULL_LABEL:
                return [replace(_row([(outcome, contestant)], store), method=FULL_LABEL, baseline=False)]
    return []


def _method(outcomes: Sequence[Outcome], store: Store) -> list[Row]:
    """A method's contestants over its seeds: random draws and its own start where they were scored, and the best."""
    rows = []
    cell = outcomes[0].cell
    reported = [each for each in outcomes if each.report is not None]
    labels = dict.fromkeys(c.label for each in reported for c in each.report.contestants)  # type: ignore[union-attr]
    for label in labels:
        held = [(each, c) for each in reported for c in each.report.contestants if c.label == label]  # type: ignore[union-attr]
        # Of a baseline of random ones, the draws themselves are the result, not the best of them.
        if label != FULL_LABEL and not (cell.baseline and label == BEST_LABEL and len(labels) > 2):
            rows.append(_row(held, store))
    failures = [f"seed {each.cell.config.seed}: {each.failure}" for each in outcomes if each.failure is not None]
    if failures:
        empty = Row("", "", cell.method, BEST_LABEL, cell.baseline, failure="; ".join(failures))
        best = next((row for row in rows if row.contestant == BEST_LABEL), empty)
        said = dict.fromkeys(each for each in (best.failure, empty.failure) if each is not None)
        rows = [row for row in rows if row is not best] + [replace(best, failure="; ".join(said))]
    return rows


def _row(held: Sequence[tuple[Outcome, Contestant]], store: Store) -> Row:
    cell, first = held[0][0].cell, held[0][1]
    scored = {score.split for _, contestant in held for score in contestant.scores}
    if first.ref is not None and held[0][0].plan.config.final.test:
        scored.add("test")  # an individual that broke there has no score
    splits = [split for split in SPLITS if split in scored]
    scores: list[Measured] = []
    outcomes: tuple[Outcomes, ...] = ()
    for split in splits:
        here = () if first.draws else _outcomes(held, split, store)
        scores += _measured(held, split, here)
        if split == "test":
            scores += _held_out(held)
        if split == "test" or ("test" not in splits and split == "search"):
            outcomes = here
    costs = [_cost(outcome, contestant, store) for outcome, contestant in held]
    return Row(
        task="",
        budget="",
        method=cell.method,
        contestant=first.label,
        baseline=cell.baseline,
        seeds=len(held),
        scores=tuple(scores),
        parameters=fmean(contestant.parameters for _, contestant in held),
        active_parameters=fmean(contestant.active_parameters for _, contestant in held),
        evaluations=fmean(evaluations for evaluations, _ in costs),
        seconds=fmean(seconds for _, seconds in costs),
        refs=tuple(contestant.ref for _, contestant in held if contestant.ref is not None),
        failure=_breaks(held, splits, store),
        outcomes=outcomes,
    )


def _breaks(held: Sequence[tuple[Outcome, Contestant]], splits: Sequence[Split], store: Store) -> str | None:
    """Where individuals failed on examples that they weren't chosen by."""
    measured = {reference.fingerprint for split in splits for reference in held[0][0].plan.splits(split)}
    said = [
        f"seed {outcome.cell.config.seed} on {record.split}: {record.failure}"
        for outcome, contestant in held
        for record in (() if contestant.ref is None else store.individual(contestant.ref).evaluations)
        if record.failure is not None and record.task_fingerprint in measured
    ]
    return "; ".join(said) or None


def _cost(outcome: Outcome, contestant: Contestant, store: Store) -> tuple[float, float]:
    """Models evaluated and seconds; a method's own start takes no evaluation to find, random draws take theirs."""
    if contestant.label == FULL_LABEL:
        return 0.0, 0.0
    plan = outcome.plan
    config, recipe, model = plan.config, plan.space.recipe, plan.facts.fingerprint
    calibration = None if recipe is None else stored_calibration(recipe, config, store, plan.search_id, model)
    begun = 0.0 if calibration is None else calibration.seconds or 0.0
    if contestant.label != BEST_LABEL and not contestant.draws:
        return 0.0, begun
    costs = store.costs(store.search(plan.search_id))
    seconds = sum(each.seconds_alone for each in costs.splits if each.split != "test")
    share = min(1.0, contestant.draws / costs.phenotypes) if contestant.draws and costs.phenotypes else 1.0
    return costs.phenotypes * share, seconds * share + begun


def _measured(
    held: Sequence[tuple[Outcome, Contestant]], split: Split, outcomes: Sequence[Outcomes]
) -> Iterable[Measured]:
    """The weighted mean over tasks, then each task where there are several."""
    plan, draws = held[0][0].plan, held[0][1].draws
    weights = dict(zip((each.task for each in plan.splits(split)), plan.weights, strict=True))
    for task in ("", *weights) if len(weights) > 1 else ("",):
        chosen = {name: weight for name, weight in weights.items() if task in ("", name)}
        values, spreads = [], []
        for _, contestant in held:
            found = {score.task: score for score in contestant.scores if score.split == split and score.task in chosen}
            total = sum(chosen.values())
            values.append(sum(chosen[name] * score.score for name, score in found.items()) / total)
            spreads.append(sum(chosen[name] * (score.high - score.score) for name, score in found.items()) / total)
        pieces = [each for name, each in zip(weights, outcomes, strict=True) if name in chosen] if outcomes else []
        low, high = weighted_interval(pieces) if pieces else (None, None)
        spread = fmean(spreads) if draws else stdev(values) if len(values) > 1 else None
        yield Measured(task, split, fmean(values), low, high, spread)


def _held_out(held: Sequence[tuple[Outcome, Contestant]]) -> Iterable[Measured]:
    """Scores on tasks that were no part of the fitness."""
    searched = {each.task for each in held[0][0].plan.splits("test")}
    tasks = dict.fromkeys(score.task for _, contestant in held for score in contestant.scores)
    for task in (task for task in tasks if task not in searched):
        found = [score for _, contestant in held for score in contestant.scores if score.task == task]
        values = [score.score for score in found]
        spread = stdev(values) if len(values) > 1 else None
        low, high = (found[0].low, found[0].high) if len(values) == 1 else (None, None)
        yield Measured(task, "test", fmean(values), low, high, spread)


def _outcomes(held: Sequence[tuple[Outcome, Contestant]], split: Split, store: Store) -> tuple[Outcomes, ...]:
    """Per task, what the examples scored on average over seeds: nothing from an individual that broke on them."""
    plan = held[0][0].plan
    found = []
    for prepared, weight in zip(plan.prepared[split], plan.weights, strict=True):
        per_seed = []
        for outcome, contestant in held:
            config, model = outcome.plan.config, outcome.plan.facts.fingerprint
            engine = engine_fingerprint(config.model.to_worker(), config.engine.to_worker())
            records = store.evaluations(contestant.phenotype or "", model, engine, [prepared.fingerprint])
            for record in records:
                broken = np.zeros(len(prepared.examples), dtype="<f4").tobytes()
                kept = broken if record.failure is not None else record.outcomes or b""
                per_seed.append(np.frombuffer(kept, dtype="<f4").astype(np.float64))
        logs = prepared.metric == "geometric_mean" and len(per_seed) > 1
        stacked = np.stack(per_seed)
        values = np.exp(np.log(np.maximum(stacked, 1e-30)).mean(axis=0)) if logs else stacked.mean(axis=0)
        found.append(Outcomes(values, prepared.metric, weight))
    return tuple(found)


def _tested(rows: list[Row]) -> list[Row]:
    """The rows of one (task, budget) with their paired tests."""
    full = next((row for row in rows if row.method == FULL_LABEL and row.outcomes), None)
    baselines = [row for row in rows if row.baseline and row.outcomes and row.headline is not None]
    best = max(baselines, key=lambda row: row.headline.score, default=None)  # type: ignore[union-attr]
    return [
        replace(row, against_full=_against(row, full), against_baseline=_against(row, best), outcomes=())
        for row in rows
    ]


def _against(row: Row, other: Row | None) -> Significance | None:
    if other is None or other is row or not row.outcomes or row.headline is None or other.headline is None:
        return None
    if row.headline.split != other.headline.split:
        return None
    return paired_test(row.outcomes, other.outcomes)
