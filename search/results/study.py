"""The rows of a comparison: scores over seeds, costs, and paired tests against the full model and the best baseline."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from statistics import fmean, stdev

import numpy as np
from numpy.typing import NDArray

from moevolve.evaluators.types import SCORED, Split
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
from moevolve.search.results.significance import Significance, TaskOutcomes, paired_test, score_interval
from moevolve.search.running.calibration import stored_calibration
from moevolve.search.running.study import StudyResult
from moevolve.store.reader import StoreReader
from moevolve.store.records import EvaluationRecord

_SeedEntries = Sequence[tuple[StudyResult, Entry]]
"""One entry of the final table from each seed's search that has it."""
_Evaluations = Sequence[Mapping[tuple[str, Split], EvaluationRecord]]
"""Stored evaluations by task and split, one mapping per seed."""


@dataclass(frozen=True, slots=True)
class StudyRow:
    """One model, or the mean over random draws, at one budget on one search task (or several in one fitness).

    Attributes:
        task, budget, method: Labels of the comparison; `method` is `full model` for the unedited model.
        contestant: Label of the final table: `best found`, `unsearched start`, `random pruning, 20 draws` ...
        seeds: Number of searches that the row is a mean of.
        scores: Means over seeds. Per split, first the mean over tasks, then each task's if there are several, then
            scores on held-out tasks. Intervals are over examples and, with several seeds, over seeds
            (`score_interval`); means over random draws and several seeds of a held-out task have none.
        parameters, active_parameters: Parameters of the model in total and per token, mean over seeds.
        evaluations: Number of different models evaluated on `search` or `dev`, mean over seeds.
        seconds: Workers' time for these evaluations and for what the method measures first, mean over seeds.
        against_full, against_baseline: Paired tests on `test` against the full model and the best baseline; None if
            there is nothing to pair.
        best_by: Split by which the best baseline was chosen: `dev`, or `search` if not all have a score on `dev`.
        refs: The individuals as SEARCH:INDEX, one per seed.
        failure: Reason why the row is empty, or lacks seeds or the scores of a split.
        outcomes: Per task, input of the paired tests; empty after `with_tests`.
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
    outcomes: tuple[TaskOutcomes, ...] = field(default=(), repr=False)

    def score(self, split: Split, task: str = "") -> Score | None:
        """The score on a split, of one task or, by default, of all tasks together."""
        return next((each for each in self.scores if (each.split, each.task) == (split, task)), None)

    @property
    def headline(self) -> Score | None:
        """The score on `test`, or on `search` if `test` wasn't scored."""
        return self.score("test") or self.score("search")


def study_rows(results: Sequence[StudyResult], store: StoreReader) -> list[StudyRow]:
    """Rows in the order of the comparison's cells; each (task, budget) begins with the full model."""
    rows: list[StudyRow] = []
    for (task, budget), group in groupby(results, key=lambda each: (each.cell.task, each.cell.budget)):
        here = list(group)
        seeds = tuple(dict.fromkeys(each.cell.config.seed for each in here))
        found = _full_rows(here, seeds, store)
        for method in dict.fromkeys(each.cell.method for each in here):
            found += _method_rows([each for each in here if each.cell.method == method], seeds, store)
        rows += with_tests([replace(row, task=task, budget=budget) for row in found])
    return rows


def _full_rows(results: Sequence[StudyResult], seeds: tuple[int, ...], store: StoreReader) -> list[StudyRow]:
    # All searches scored the same unedited model, so the first with a final table is enough.
    for result, table in _with_tables(results):
        row = replace(_row([(result, table.full)], (result.cell.config.seed,), store), method=FULL_LABEL)
        # Its outcomes are the same with every seed.
        repeated = tuple(replace(each, values=each.values.repeat(len(seeds), axis=0)) for each in row.outcomes)
        return [replace(row, baseline=False, outcomes=repeated)]
    return []


def _with_tables(results: Sequence[StudyResult]) -> Iterator[tuple[StudyResult, FinalTable]]:
    return ((each, each.table) for each in results if each.table is not None)


def _method_rows(results: Sequence[StudyResult], seeds: tuple[int, ...], store: StoreReader) -> list[StudyRow]:
    """A method's rows: random draws and its unsearched start, if they were scored, and the best individual."""
    rows = []
    cell = results[0].cell
    # One-shot baselines among a search's initial individuals get no rows: to be compared, they are methods themselves.
    own = (FULL_LABEL, START_LABEL, BEFORE_LABEL, BEST_LABEL)
    entries = [(result, entry) for result, table in _with_tables(results) for entry in table.entries]
    labels = dict.fromkeys(entry.label for _, entry in entries if entry.draws or entry.label in own)
    for label in labels:
        per_seed = [(result, entry) for result, entry in entries if entry.label == label]
        # The result of a random baseline is the mean of its draws, not the best of them.
        if label != FULL_LABEL and not (cell.baseline and label == BEST_LABEL and len(labels) > 2):
            rows.append(_row(per_seed, seeds, store))
    failures = [f"seed {each.cell.config.seed}: {each.failure}" for each in results if each.failure is not None]
    if failures:
        empty = StudyRow("", "", cell.method, BEST_LABEL, cell.baseline, failure="; ".join(failures))
        best = next((row for row in rows if row.contestant == BEST_LABEL), empty)
        reasons = dict.fromkeys(each for each in (best.failure, empty.failure) if each is not None)
        rows = [row for row in rows if row is not best] + [replace(best, failure="; ".join(reasons))]
    return rows


def _row(entries: _SeedEntries, seeds: tuple[int, ...], store: StoreReader) -> StudyRow:
    cell, first = entries[0][0].cell, entries[0][1]
    evaluations = [_evaluations(result, entry, store) for result, entry in entries]
    scores: list[Score] = []
    outcomes: tuple[TaskOutcomes, ...] = ()
    for split in SCORED:
        tasks = [each.task for each in entries[0][0].setup.prepared.get(split, ())]
        if tasks and all(entry.score(task, split) for _, entry in entries for task in tasks):
            outcomes = () if first.draws else _outcomes(entries, evaluations, split, seeds)
            scores += _split_scores(entries, split, outcomes)
    costs = [_cost(result, entry, store) for result, entry in entries]
    return StudyRow(
        task="",
        budget="",
        method=cell.method,
        contestant=first.label,
        baseline=cell.baseline,
        seeds=len(entries),
        scores=(*scores, *_held_out_scores(entries)),
        parameters=fmean(entry.parameters or 0 for _, entry in entries),
        active_parameters=fmean(entry.active_parameters or 0 for _, entry in entries),
        evaluations=fmean(evaluations for evaluations, _ in costs),
        seconds=fmean(seconds for _, seconds in costs),
        refs=tuple(entry.ref for _, entry in entries if entry.ref is not None),
        failure=_failures(entries),
        outcomes=outcomes if scores and scores[-1].split == "test" else (),
    )


def _evaluations(result: StudyResult, entry: Entry, store: StoreReader) -> dict[tuple[str, Split], EvaluationRecord]:
    if entry.phenotype is None:
        return {}
    found = Scorer(store, store.search(result.setup.search_id), result.setup.config).find([entry.phenotype])
    return {(task, split): record for (_, task, split), record in found.items()}


def _failures(entries: _SeedEntries) -> str | None:
    """Why individuals failed on splits other than the one they were chosen on."""
    reasons = dict.fromkeys(
        f"seed {result.cell.config.seed} on {score.split}: {score.failure}"
        for result, entry in entries
        for score in entry.scores
        if score.failure is not None
    )
    return "; ".join(reasons) or None


def _cost(result: StudyResult, entry: Entry, store: StoreReader) -> tuple[float, float]:
    """Number of models evaluated to find an entry, and the workers' seconds."""
    if entry.label == FULL_LABEL:
        return 0.0, 0.0
    setup = result.setup
    config, recipe, model = setup.config, setup.space.recipe, setup.facts.fingerprint
    calibration = None if recipe is None else stored_calibration(recipe, config, store, setup.search_id, model)
    calibration_s = 0.0 if calibration is None else calibration.seconds
    if entry.label != BEST_LABEL and not entry.draws:
        return 0.0, calibration_s  # an unsearched start takes no evaluations
    costs = store.costs(store.search(setup.search_id))
    seconds = sum(each.seconds_alone for each in costs.splits if each.split != "test")
    # Of all evaluations, random draws only cost their own.
    share = min(1.0, entry.draws / costs.phenotypes) if entry.draws and costs.phenotypes else 1.0
    return costs.phenotypes * share, seconds * share + calibration_s


def _split_scores(entries: _SeedEntries, split: Split, outcomes: Sequence[TaskOutcomes]) -> Iterable[Score]:
    """The weighted mean over tasks, then each task's score if there are several. A failed evaluation scores 0."""
    setup, draws = entries[0][0].setup, entries[0][1].draws
    weights = dict(zip((each.task for each in setup.prepared[split]), setup.weights, strict=True))
    for task in ("", *weights) if len(weights) > 1 else ("",):
        shares = {name: weight / sum(weights.values()) for name, weight in weights.items()} if not task else {task: 1.0}
        per_seed = [[(share, entry.score(name, split)) for name, share in shares.items()] for _, entry in entries]
        values = [sum(share * (score.score or 0.0) for share, score in each if score) for each in per_seed]
        spreads = [sum(share * (score.spread or 0.0) for share, score in each if score) for each in per_seed]
        chosen = [each for name, each in zip(weights, outcomes, strict=True) if name in shares] if outcomes else []
        low, high = score_interval(chosen) if chosen else (None, None)
        spread = fmean(spreads) if draws else stdev(values) if len(values) > 1 else None
        yield Score(task, split, fmean(values), low, high, spread)


def _held_out_scores(entries: _SeedEntries) -> Iterable[Score]:
    """Scores on tasks that weren't part of the fitness."""
    searched = {each.task for each in entries[0][0].setup.prepared["search"]}
    for task in dict.fromkeys(score.task for _, entry in entries for score in entry.scores):
        found = [entry.score(task, "test") for _, entry in entries]
        if task in searched or None in found:
            continue
        values = [score.score or 0.0 for score in found if score is not None]
        spread = stdev(values) if len(values) > 1 else None
        low, high = (found[0].low, found[0].high) if len(values) == 1 and found[0] else (None, None)
        yield Score(task, "test", fmean(values), low, high, spread)


def _outcomes(
    entries: _SeedEntries, evaluations: _Evaluations, split: Split, seeds: tuple[int, ...]
) -> tuple[TaskOutcomes, ...]:
    """Per task, the outcomes of all seeds; zeros for a failed evaluation."""
    setup = entries[0][0].setup
    pieces = []
    for prepared, weight in zip(setup.prepared[split], setup.weights, strict=True):
        rows: dict[int, NDArray[np.float32]] = {}
        failed = np.zeros(len(prepared.examples) if prepared.window is None else 1, dtype=np.float32)
        for (result, _), found in zip(entries, evaluations, strict=True):
            record = found.get((prepared.task, split))
            stored = None if record is None or record.failure is not None else record.outcomes
            row = failed if stored is None else np.frombuffer(stored, dtype="<f4")
            rows[seeds.index(result.cell.config.seed)] = row
        # The number of windows of running text depends on the tokenizer; a failed evaluation has only one.
        values = np.full((len(seeds), max(map(len, rows.values()), default=len(failed))), np.nan)
        for place, row in rows.items():
            values[place] = row
        pieces.append(TaskOutcomes(values, prepared.metric, weight))
    return tuple(pieces)


def with_tests(rows: list[StudyRow]) -> list[StudyRow]:
    """Add paired tests to the rows of one (task, budget). The best baseline is chosen without the `test` split."""
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


def _against(row: StudyRow, other: StudyRow | None) -> Significance | None:
    if other is None or other is row or not row.outcomes or not other.outcomes:
        return None
    if any(a.values.shape != b.values.shape for a, b in zip(row.outcomes, other.outcomes, strict=True)):
        return None  # one failed with every seed on running text, so that its number of windows isn't known
    found = paired_test(row.outcomes, other.outcomes)
    return None if found is None else replace(found, against=other.method)
