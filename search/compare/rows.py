"""The rows of a comparison: every contestant's scores over seeds, what they cost, and whether differences are real."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from statistics import fmean, stdev

import numpy as np
from numpy.typing import NDArray

from moevolve.evaluators.types import SCORED, Split
from moevolve.search.compare.run import Outcome
from moevolve.search.compare.significance import Outcomes, Significance, paired_test, score_interval
from moevolve.search.loop.final_table import (
    BEFORE_LABEL,
    BEST_LABEL,
    FULL_LABEL,
    START_LABEL,
    Entry,
    FinalTable,
    Score,
    Scorer,
)
from moevolve.search.running.calibration import stored_calibration
from moevolve.store.reader import StoreReader
from moevolve.store.records import EvaluationRecord

_Held = Sequence[tuple[Outcome, Entry]]
"""A contestant in each of the searches, one per seed, that have it."""
_Found = Sequence[dict[tuple[str, Split], EvaluationRecord]]
"""By task and split, what the entries were evaluated on, in the same order."""


@dataclass(frozen=True, slots=True)
class ComparisonRow:
    """One contestant at one budget on one search task (or several in one fitness).

    Attributes:
        task, budget, method: labels of the comparison; method is `full model` for the unedited one.
        contestant: `best found`, `unsearched start`, `random pruning, 20 draws` ...
        baseline: whether it is a one-shot baseline.
        seeds: how many searches it is a mean of.
        scores: per split, the mean over tasks first, then (if there are several) each task's, and held-out ones';
            each the mean over seeds. Intervals are over examples and, of several seeds, over seeds (`score_interval`);
            there are none for means over random draws, and for several seeds of a held-out task.
        parameters, active_parameters: of the model, per token the second; means over seeds.
        evaluations: different models evaluated on `search` or `dev`, mean over seeds.
        seconds: workers' time for them and for what the method starts from, mean over seeds.
        against_full, against_baseline: paired tests on `test` against the full model, and against the best baseline;
            None where there is nothing to pair.
        best_by: split that says which baseline is the best one: `dev`, or `search` where not all were scored on that.
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
    scores: tuple[Score, ...] = ()
    parameters: float = 0.0
    active_parameters: float = 0.0
    evaluations: float = 0.0
    seconds: float = 0.0
    against_full: Significance | None = None
    against_baseline: Significance | None = None
    best_by: Split | None = None
    refs: tuple[str, ...] = ()
    failure: str | None = None
    outcomes: tuple[Outcomes, ...] = field(default=(), repr=False)

    def score(self, split: Split, task: str = "") -> Score | None:
        """The score on a split; of all tasks together unless one is named."""
        return next((each for each in self.scores if (each.split, each.task) == (split, task)), None)

    @property
    def headline(self) -> Score | None:
        """The score that counts: on `test`, or on `search` where that wasn't scored."""
        return self.score("test") or self.score("search")


def comparison_rows(outcomes: Sequence[Outcome], store: StoreReader) -> list[ComparisonRow]:
    """Rows in the order of the comparison's cells, each (task, budget) begun by the full model."""
    rows: list[ComparisonRow] = []
    for (task, budget), group in groupby(outcomes, key=lambda each: (each.cell.task, each.cell.budget)):
        here = list(group)
        seeds = tuple(dict.fromkeys(each.cell.config.seed for each in here))
        found = _full(here, seeds, store)
        for method in dict.fromkeys(each.cell.method for each in here):
            found += _method([each for each in here if each.cell.method == method], seeds, store)
        rows += with_tests([replace(row, task=task, budget=budget) for row in found])
    return rows


def _full(outcomes: Sequence[Outcome], seeds: tuple[int, ...], store: StoreReader) -> list[ComparisonRow]:
    """The unedited model; every search scored the same one, so the first that got so far will do."""
    for outcome, report in _reported(outcomes):
        row = replace(_row([(outcome, report.full)], (outcome.cell.config.seed,), store), method=FULL_LABEL)
        # It is the same with every seed.
        every = tuple(replace(each, values=each.values.repeat(len(seeds), axis=0)) for each in row.outcomes)
        return [replace(row, baseline=False, outcomes=every)]
    return []


def _reported(outcomes: Sequence[Outcome]) -> Iterator[tuple[Outcome, FinalTable]]:
    return ((each, each.report) for each in outcomes if each.report is not None)


def _method(outcomes: Sequence[Outcome], seeds: tuple[int, ...], store: StoreReader) -> list[ComparisonRow]:
    """A method's entries over its seeds: random draws and its own start where they were scored, and the best."""
    rows = []
    cell = outcomes[0].cell
    # One-shot baselines that a search begins with are methods of their own, if they are to be compared.
    own = (FULL_LABEL, START_LABEL, BEFORE_LABEL, BEST_LABEL)
    entries = (c for _, report in _reported(outcomes) for c in report.entries)
    labels = dict.fromkeys(c.label for c in entries if c.draws or c.label in own)
    for label in labels:
        held = [(each, c) for each, report in _reported(outcomes) for c in report.entries if c.label == label]
        # Of a baseline of random ones, the draws themselves are the result, not the best of them.
        if label != FULL_LABEL and not (cell.baseline and label == BEST_LABEL and len(labels) > 2):
            rows.append(_row(held, seeds, store))
    failures = [f"seed {each.cell.config.seed}: {each.failure}" for each in outcomes if each.failure is not None]
    if failures:
        empty = ComparisonRow("", "", cell.method, BEST_LABEL, cell.baseline, failure="; ".join(failures))
        best = next((row for row in rows if row.contestant == BEST_LABEL), empty)
        said = dict.fromkeys(each for each in (best.failure, empty.failure) if each is not None)
        rows = [row for row in rows if row is not best] + [replace(best, failure="; ".join(said))]
    return rows


def _row(held: _Held, seeds: tuple[int, ...], store: StoreReader) -> ComparisonRow:
    cell, first = held[0][0].cell, held[0][1]
    found = [_evaluations(outcome, contestant, store) for outcome, contestant in held]
    scores: list[Score] = []
    outcomes: tuple[Outcomes, ...] = ()
    for split in SCORED:
        tasks = [each.task for each in held[0][0].setup.prepared.get(split, ())]
        if tasks and all(contestant.score(task, split) for _, contestant in held for task in tasks):
            outcomes = () if first.draws else _outcomes(held, found, split, seeds)
            scores += _measured(held, split, outcomes)
    costs = [_cost(outcome, contestant, store) for outcome, contestant in held]
    return ComparisonRow(
        task="",
        budget="",
        method=cell.method,
        contestant=first.label,
        baseline=cell.baseline,
        seeds=len(held),
        scores=(*scores, *_held_out(held)),
        parameters=fmean(contestant.parameters or 0 for _, contestant in held),
        active_parameters=fmean(contestant.active_parameters or 0 for _, contestant in held),
        evaluations=fmean(evaluations for evaluations, _ in costs),
        seconds=fmean(seconds for _, seconds in costs),
        refs=tuple(contestant.ref for _, contestant in held if contestant.ref is not None),
        failure=_breaks(held),
        outcomes=outcomes if scores and scores[-1].split == "test" else (),
    )


def _evaluations(outcome: Outcome, contestant: Entry, store: StoreReader) -> dict[tuple[str, Split], EvaluationRecord]:
    if contestant.phenotype is None:
        return {}
    found = Scorer(store, store.search(outcome.setup.search_id), outcome.setup.config).find([contestant.phenotype])
    return {(task, split): record for (_, task, split), record in found.items()}


def _breaks(held: _Held) -> str | None:
    """Where individuals failed on examples that they weren't chosen by."""
    said = dict.fromkeys(
        f"seed {outcome.cell.config.seed} on {score.split}: {score.failure}"
        for outcome, contestant in held
        for score in contestant.scores
        if score.failure is not None
    )
    return "; ".join(said) or None


def _cost(outcome: Outcome, contestant: Entry, store: StoreReader) -> tuple[float, float]:
    """Models evaluated and seconds; a method's own start takes no evaluation to find, random draws take theirs."""
    if contestant.label == FULL_LABEL:
        return 0.0, 0.0
    setup = outcome.setup
    config, recipe, model = setup.config, setup.space.recipe, setup.facts.fingerprint
    calibration = None if recipe is None else stored_calibration(recipe, config, store, setup.search_id, model)
    begun = 0.0 if calibration is None else calibration.seconds
    if contestant.label != BEST_LABEL and not contestant.draws:
        return 0.0, begun
    costs = store.costs(store.search(setup.search_id))
    seconds = sum(each.seconds_alone for each in costs.splits if each.split != "test")
    share = min(1.0, contestant.draws / costs.phenotypes) if contestant.draws and costs.phenotypes else 1.0
    return costs.phenotypes * share, seconds * share + begun


def _measured(held: _Held, split: Split, outcomes: Sequence[Outcomes]) -> Iterable[Score]:
    """The weighted mean over tasks, then each task where there are several; one that broke scores nothing."""
    setup, draws = held[0][0].setup, held[0][1].draws
    weights = dict(zip((each.task for each in setup.prepared[split]), setup.weights, strict=True))
    for task in ("", *weights) if len(weights) > 1 else ("",):
        chosen = {name: weight / sum(weights.values()) for name, weight in weights.items()} if not task else {task: 1.0}
        here = [[(share, contestant.score(name, split)) for name, share in chosen.items()] for _, contestant in held]
        values = [sum(share * (score.score or 0.0) for share, score in each if score) for each in here]
        spreads = [sum(share * (score.spread or 0.0) for share, score in each if score) for each in here]
        pieces = [each for name, each in zip(weights, outcomes, strict=True) if name in chosen] if outcomes else []
        low, high = score_interval(pieces) if pieces else (None, None)
        spread = fmean(spreads) if draws else stdev(values) if len(values) > 1 else None
        yield Score(task, split, fmean(values), low, high, spread)


def _held_out(held: _Held) -> Iterable[Score]:
    """Scores on tasks that were no part of the fitness."""
    searched = {each.task for each in held[0][0].setup.prepared["search"]}
    for task in dict.fromkeys(score.task for _, contestant in held for score in contestant.scores):
        found = [contestant.score(task, "test") for _, contestant in held]
        if task in searched or None in found:
            continue
        values = [score.score or 0.0 for score in found if score is not None]
        spread = stdev(values) if len(values) > 1 else None
        low, high = (found[0].low, found[0].high) if len(values) == 1 and found[0] else (None, None)
        yield Score(task, "test", fmean(values), low, high, spread)


def _outcomes(held: _Held, found: _Found, split: Split, seeds: tuple[int, ...]) -> tuple[Outcomes, ...]:
    """Per task, what the examples scored with each seed: nothing from an individual that broke on them."""
    setup = held[0][0].setup
    pieces = []
    for prepared, weight in zip(setup.prepared[split], setup.weights, strict=True):
        kept_rows: dict[int, NDArray[np.float32]] = {}
        failed = np.zeros(len(prepared.examples) if prepared.window is None else 1, dtype=np.float32)
        for (outcome, _), evaluations in zip(held, found, strict=True):
            record = evaluations.get((prepared.task, split))
            kept = None if record is None or record.failure is not None else record.outcomes
            row = failed if kept is None else np.frombuffer(kept, dtype="<f4")
            kept_rows[seeds.index(outcome.cell.config.seed)] = row
        # Windows of running text are as many as the tokenizer makes of it; a failure knows of one.
        values = np.full((len(seeds), max(map(len, kept_rows.values()), default=len(failed))), np.nan)
        for place, row in kept_rows.items():
            values[place] = row
        pieces.append(Outcomes(values, prepared.metric, weight))
    return tuple(pieces)


def with_tests(rows: list[ComparisonRow]) -> list[ComparisonRow]:
    """The rows of one (task, budget) with their paired tests; `test` has no say in which baseline is the best."""
    full = next((row for row in rows if row.method == FULL_LABEL), None)
    baselines = [row for row in rows if row.baseline and row.outcomes]
    by: Split = "dev" if all(row.score("dev") for row in baselines) else "search"
    scored = [(found.score or 0.0, row) for row in baselines if (found := row.score(by)) is not None]
    best = max(scored, key=lambda pair: pair[0], default=(0.0, None))[1]
    return [
        replace(
            row,
            against_full=_against(row, full),
            against_baseline=_against(row, best),
            best_by=None if best is None else by,
            outcomes=(),
        )
        for row in rows
    ]


def _against(row: ComparisonRow, other: ComparisonRow | None) -> Significance | None:
    if other is None or other is row or not row.outcomes or not other.outcomes:
        return None
    if any(a.values.shape != b.values.shape for a, b in zip(row.outcomes, other.outcomes, strict=True)):
        return None  # one failed on all of some running text, so that its windows weren't counted
    found = paired_test(row.outcomes, other.outcomes)
    return None if found is None else replace(found, against=other.method)
