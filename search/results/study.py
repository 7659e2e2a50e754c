"""The rows of a study: scores over seeds, costs, and paired tests against the full model and the best baseline."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from statistics import fmean

from moevolve.evaluators.metrics import mean_on_scale
from moevolve.evaluators.records import short_repr
from moevolve.evaluators.scales import common_scale
from moevolve.evaluators.types import SCORED, Split
from moevolve.search.loop.final_table import (
    BEFORE_LABEL,
    BEST_LABEL,
    FULL_LABEL,
    START_LABEL,
    Entry,
    drawn,
    random_draws,
)
from moevolve.search.loop.scores import ModelScores, Score, SearchScores, TaskSplit, mean_score, task_outcomes
from moevolve.search.loop.significance import Significance, TaskOutcomes, paired_test
from moevolve.search.running.calibration import stored_calibration
from moevolve.search.running.study import StudyResult
from moevolve.store.reader import StoreReader

# One entry of the final table from each seed's search that has it.
_SeedEntries = Sequence[tuple[StudyResult, Entry]]
# A row with its outcomes on `test`, which its paired tests compare; none for means over random draws.
_Tested = tuple["StudyRow", Sequence[TaskOutcomes]]


@dataclass(frozen=True, slots=True)
class StudyRow:
    """One model, or the mean over random draws, at one budget on one search task (or several in one fitness).

    Attributes:
        task, budget, method: Labels of the study; `method` is `full model` for the unedited model.
        contestant: Label of the final table: `best found`, `unsearched start`, `random pruning, 20 draws` ...
        seeds: Number of searches that the row is a mean of.
        scores: Means over seeds. Per split, first the mean over tasks, then each task's if there are several, then
            scores on held-out tasks. Intervals are over examples and, with several seeds, over seeds
            (`score_interval`); means over random draws have none.
        parameters, active_parameters: Parameters of the model in total and per token, mean over seeds.
        evaluations: Number of different models evaluated on `search` or `dev`, mean over seeds.
        seconds: Workers' time for these evaluations and for the method's calibration, mean over seeds.
        against_full, against_baseline: Paired tests on `test` against the full model and the best baseline; None
            without examples to pair.
        best_by: Split by which the best baseline was chosen: `dev`, or `search` if not all have a score on `dev`.
        refs: The individuals as SEARCH:INDEX, one per seed.
        failure: Reason why the row is empty, or lacks seeds or the scores of a split.
    """

    __repr__ = short_repr

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

    def score(self, split: Split, task: str = "") -> Score | None:
        """Return the score on a split, of one task or, by default, of all tasks together."""
        return next((each for each in self.scores if (each.split, each.task) == (split, task)), None)

    @property
    def headline(self) -> Score | None:
        """The score on `test`, or on `search` if `test` wasn't scored."""
        return self.score("test") or self.score("search")


def study_rows(results: Sequence[StudyResult], store: StoreReader) -> list[StudyRow]:
    """Return the rows in the order of the study's cells; each (task, budget) begins with the full model."""
    rows: list[StudyRow] = []
    for (task, budget), group in groupby(results, key=lambda each: (each.cell.task, each.cell.budget)):
        here = list(group)
        found = _full_rows(here, store)
        for method in dict.fromkeys(each.cell.method for each in here):
            found += _method_rows([each for each in here if each.cell.method == method], store)
        rows += with_tests([(replace(row, task=task, budget=budget), outcomes) for row, outcomes in found])
    return rows


def _full_rows(results: Sequence[StudyResult], store: StoreReader) -> list[_Tested]:
    seeds = tuple(dict.fromkeys(each.cell.config.seed for each in results))
    # All searches scored the same unedited model, so the first with a final table is enough.
    for result in results:
        if result.table is not None:
            row, outcomes = _row([(result, result.table.full)], store)
            # Its outcomes are the same with every seed.
            repeated = [replace(each, values=each.values.repeat(len(seeds), axis=0), seeds=seeds) for each in outcomes]
            return [(replace(row, method=FULL_LABEL, baseline=False), repeated)]
    return []


def _method_rows(results: Sequence[StudyResult], store: StoreReader) -> list[_Tested]:
    """Return a method's rows: random draws and its unsearched start, if they were scored, and the best individual."""
    cell = results[0].cell
    # One-shot baselines among a search's initial individuals get no rows: to be compared, they are methods themselves.
    own = (START_LABEL, BEFORE_LABEL, BEST_LABEL)
    entries = [(result, entry) for result in results if result.table is not None for entry in result.table.entries]
    labels = dict.fromkeys(entry.label for _, entry in entries if entry.draws or entry.label in own)
    if cell.baseline and len(labels) > 1:
        labels.pop(BEST_LABEL, None)  # the result of a random baseline is the mean of its draws, not the best of them
    rows = [_row([pair for pair in entries if pair[1].label == label], store) for label in labels]
    failures = [f"seed {each.cell.config.seed}: {each.failure}" for each in results if each.failure is not None]
    if failures:
        empty = StudyRow("", "", cell.method, BEST_LABEL, cell.baseline)
        best, outcomes = next((pair for pair in rows if pair[0].contestant == BEST_LABEL), (empty, []))
        reasons = dict.fromkeys(each for each in (best.failure, "; ".join(failures)) if each is not None)
        rows = [pair for pair in rows if pair[0] is not best]
        rows.append((replace(best, failure="; ".join(reasons)), outcomes))
    return rows


def _row(entries: _SeedEntries, store: StoreReader) -> _Tested:
    cell, first = entries[0][0].cell, entries[0][1]
    models = [_models(result, entry, store) for result, entry in entries]
    # Except of random draws, there is one model of each seed.
    alone = [] if first.draws else [model for (model,) in models]
    found = (
        _mean_over_draws(models, split, task) if first.draws else mean_score(alone, split, task)
        for task, split in _measured(models[0][0])
    )
    outcomes = [] if first.draws else task_outcomes(alone, "test")
    costs = [_cost(result, entry, store) for result, entry in entries]
    # Why individuals failed on splits other than the one they were chosen on.
    failures = dict.fromkeys(
        f"seed {result.cell.config.seed} on {score.split}: {score.failure}"
        for result, entry in entries
        for score in entry.scores
        if score.failure is not None
    )
    row = StudyRow(
        task="",
        budget="",
        method=cell.method,
        contestant=first.label,
        baseline=cell.baseline,
        seeds=len(entries),
        scores=tuple(score for score in found if score is not None),
        parameters=fmean(entry.parameters or 0 for _, entry in entries),
        active_parameters=fmean(entry.active_parameters or 0 for _, entry in entries),
        evaluations=fmean(evaluations for evaluations, _ in costs),
        seconds=fmean(seconds for _, seconds in costs),
        refs=tuple(entry.ref for _, entry in entries if entry.ref is not None),
        failure="; ".join(failures) or None,
    )
    return row, outcomes


def _cost(result: StudyResult, entry: Entry, store: StoreReader) -> tuple[float, float]:
    """Return the number of models evaluated to find an entry, and the workers' seconds."""
    if entry.label == FULL_LABEL:
        return 0.0, 0.0
    setup = result.setup
    config, wanted, model = setup.config, setup.space.measurement, setup.facts.fingerprint
    calibration = None if wanted is None else stored_calibration(wanted, config, store, setup.search_id, model)
    calibration_s = 0.0 if calibration is None else calibration.seconds
    if entry.label != BEST_LABEL and not entry.draws:
        return 0.0, calibration_s  # an unsearched start takes no evaluations
    costs = store.costs(store.search(setup.search_id))
    seconds = sum(each.seconds_alone for each in costs.splits if each.split != "test")
    # Random draws cost only their own evaluations.
    share = min(1.0, entry.draws / costs.phenotypes) if entry.draws and costs.phenotypes else 1.0
    return costs.phenotypes * share, seconds * share + calibration_s


def _models(result: StudyResult, entry: Entry, store: StoreReader) -> list[ModelScores]:
    """Return what is stored of the models of an entry, several for random draws."""
    search = store.search(result.setup.search_id)
    scores = SearchScores(store, search)
    if entry.draws:
        return drawn(scores, random_draws(result.setup.config, store.history(search.id)))
    if result.table is not None and result.table.winner is not None:
        scores.learn(store.individual(result.table.winner).evaluations)
    return scores.of([entry.phenotype or ""])


def _measured(model: ModelScores) -> Iterator[TaskSplit]:
    """The tasks and splits of a row: a split's tasks together, then each of several; then tasks outside the fitness."""
    for split in SCORED:
        tasks = [task for (task, of), weight in model.weights.items() if of == split and weight]
        yield from (("", split), *((task, split) for task in tasks if len(tasks) > 1))
    yield from (key for key, weight in model.weights.items() if not weight)


def _mean_over_draws(models: Sequence[Sequence[ModelScores]], split: Split, task: str) -> Score | None:
    """Return the mean of every seed's random draws and over seeds, and of the draws' standard deviation."""
    found = [score for draws in models if (score := mean_score(draws, split, task)) is not None]
    if len(found) < len(models):
        return None
    scale = common_scale(score.scale for score in found)
    mean = mean_on_scale([score.score or 0.0 for score in found], [1.0] * len(found), scale)
    return Score(task, split, mean, spread=fmean(score.spread or 0.0 for score in found), scale=scale)


def with_tests(rows: Sequence[_Tested]) -> list[StudyRow]:
    """Add paired tests to the rows of one (task, budget). The best baseline is chosen without the `test` split."""
    full = next((pair for pair in rows if pair[0].method == FULL_LABEL), None)
    baselines = [pair for pair in rows if pair[0].baseline and pair[1]]
    by: Split = "dev" if all(row.score("dev") for row, _ in baselines) else "search"
    scored = [(score.score or 0.0, pair) for pair in baselines if (score := pair[0].score(by)) is not None]
    best = max(scored, key=lambda each: each[0])[1] if scored else None
    return [
        replace(
            pair[0],
            against_full=_against(pair, full),
            against_baseline=_against(pair, best),
            best_by=None if best is None else by,
        )
        for pair in rows
    ]


def _against(one: _Tested, other: _Tested | None) -> Significance | None:
    test = None if other is None or other is one else paired_test(one[1], other[1])
    return None if test is None or other is None else replace(test, against=other[0].method)
