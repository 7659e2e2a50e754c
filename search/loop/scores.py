"""Numbers computed from stored evaluations: fitness, scores, means over tasks and seeds, intervals and paired tests.

Final tables, studies, comparisons, reports and pages all take theirs from here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import stdev

import numpy as np
from numpy.typing import NDArray

from moevolve.evaluators.errors import UserError
from moevolve.evaluators.metrics import confidence_interval, mean_on_scale, weighted_mean
from moevolve.evaluators.records import short_repr
from moevolve.evaluators.scales import ScaleName, common_scale
from moevolve.evaluators.types import SCORED, Split
from moevolve.search.config.files import parse_stored_config
from moevolve.search.config.run import RunConfig
from moevolve.search.loop.significance import Significance, TaskOutcomes, paired_test, score_interval
from moevolve.store.reader import StoreReader
from moevolve.store.records import FULL_MODEL, EvaluationRecord, SearchRecord

# Name of the unedited model in place of an individual's.
FULL = "full"
# Name of a task, and one of its splits.
TaskSplit = tuple[str, Split]


def ranking_of(
    config: RunConfig,
    weights: Sequence[float],
    evaluations: Sequence[EvaluationRecord],
    full: Sequence[EvaluationRecord],
) -> tuple[float, float]:
    """Return a candidate's score over all tasks, and its tie-break by the configuration's criterion: 0 with `index`.

    Args:
        config: The search's configuration, whose `task_aggregation` says what the score is.
        weights: Weights of the tasks.
        evaluations: The candidate's evaluations on one split, one per task.
        full: The unedited model's on the same split; only needed for `task_aggregation: worst`.

    Raises:
        UserError: The unedited model's score on a task is 0, so that no share of it can be left.
    """
    scores = [record.score or 0.0 for record in evaluations]
    gold_logprobs = [record.gold_logprob or 0.0 for record in evaluations]
    if config.task_aggregation == "worst":
        zero = next((record.task for record in full if not record.score), None)
        if zero is not None:
            raise UserError(
                f"task_aggregation: the unedited model scores 0 on {zero}, so no share of it can be left; leave that "
                "task out, or set task_aggregation: mean"
            )
        score = min(score / (record.score or 1.0) for score, record in zip(scores, full, strict=True))
    else:
        score = mean_on_scale(scores, weights, common_scale(record.scale for record in evaluations))
    return score, weighted_mean(gold_logprobs, weights) if config.tie_break == "gold_logprob" else 0.0


def outcomes_of(record: EvaluationRecord) -> NDArray[np.float64]:
    """Per-example outcomes of a stored evaluation: float64 [examples]; empty if they were not kept."""
    return np.frombuffer(record.outcomes or b"", dtype="<f4").astype(np.float64)


def interval(record: EvaluationRecord) -> tuple[float, float]:
    """95 % confidence interval of a stored evaluation's score, from its per-example outcomes."""
    return confidence_interval(outcomes_of(record), metric=record.metric)


def with_outcomes(store: StoreReader, record: EvaluationRecord) -> EvaluationRecord:
    """Return the same evaluation with its per-example outcomes."""
    return store.evaluations(
        record.phenotype_hash, record.model_fingerprint, record.engine_fingerprint, [record.task_fingerprint]
    )[0]


def full_fitness(store: StoreReader, search: SearchRecord) -> float | None:
    """Fitness of a search's unedited model; None if it isn't evaluated yet, or another version stored the search."""
    scores = SearchScores(store, search)
    (full,) = scores.of([FULL_MODEL])
    records = [record for record in full.on("search") or () if record is not None]
    if not records or len(records) < len(scores.tasks):
        return None
    try:
        config = parse_stored_config(search.config, search.name)
        return ranking_of(config, [*scores.tasks.values()], records, records)[0]
    except UserError:
        return None


@dataclass(frozen=True, slots=True)
class Score:
    """A score in [0, 1] on one split of one task, or the reason of its failure.

    Attributes:
        task: Name of the task; `` for the weighted mean over the tasks of the fitness.
        low, high: 95 % confidence interval; None for means over random draws and for failures.
        spread: Standard deviation over random draws, or over seeds; None for a single model.
        scale: Scale of the shown score.
    """

    __repr__ = short_repr

    task: str
    split: Split
    score: float | None
    low: float | None = None
    high: float | None = None
    spread: float | None = None
    failure: str | None = None
    scale: ScaleName = "percent"


@dataclass(frozen=True, slots=True)
class ModelScores:
    """What one search has measured of one model: an individual, or the full model.

    Attributes:
        weights: Weight of a task in the fitness by task and split, in the order of tables; 0 for tasks outside it.
        evaluations: The model's stored evaluations on them.
        failed: Whether it is a failed individual, which scores 0 on every split.
    """

    seed: int
    weights: Mapping[TaskSplit, float]
    evaluations: Mapping[TaskSplit, EvaluationRecord] = field(repr=False)
    failed: bool = False

    def weights_on(self, split: Split, task: str = "") -> list[float]:
        """Return the weight of every task of the fitness that has a split, or that of one task, which is never 0."""
        return [self.weights.get(key) or 1.0 for key in self._keys(split, task)]

    def on(self, split: Split, task: str = "") -> list[EvaluationRecord | None] | None:
        """The evaluation on every task of the fitness, or on one task, None for failed ones; None if one is missing.

        A candidate that fails on one task of a split isn't evaluated on the tasks after it: it failed on all of them.
        """
        keys = self._keys(split, task)
        found = [self.evaluations.get(key) for key in keys]
        if keys and (self.failed or self._failure(*keys[0]) is not None):
            return [None] * len(keys)
        return None if not keys or None in found else found

    def is_evaluated(self, split: Split, task: str = "") -> bool:
        """Return whether anything is stored of the tasks of `on`."""
        return any(key in self.evaluations for key in self._keys(split, task))

    @property
    def scores(self) -> tuple[Score, ...]:
        """The stored scores on every task and split."""
        scores = []
        for task, split in self.weights:
            record, failure = self.evaluations.get((task, split)), self._failure(task, split)
            if record is not None:
                scores.append(score_of(record))
            elif failure is not None:
                scores.append(Score(task, split, None, failure=failure))
        return tuple(scores)

    def _keys(self, split: Split, task: str) -> list[TaskSplit]:
        return [(task, split)] if task else [key for key, weight in self.weights.items() if key[1] == split and weight]

    def _failure(self, task: str, split: Split) -> str | None:
        """Why the model failed on a task of a split, or on another one of the fitness if that has the task."""
        keys = self._keys(split, "") if self.weights.get((task, split)) else [(task, split)]
        found = (self.evaluations.get(key) for key in keys)
        return next((one.failure for one in found if one is not None and one.failure is not None), None)


class SearchScores:
    """What is stored of a search's models, on the task splits that it was launched with.

    Attributes:
        tasks: Weights of the tasks of the fitness by name, as configured.
    """

    def __init__(self, store: StoreReader, search: SearchRecord) -> None:
        self._store, self._search = store, search
        records = store.search_tasks(search.id, auxiliary=True)
        self.tasks = {record.task: record.weight for record in records if record.weight}
        self._fingerprints = {(record.task, record.split): record.task_fingerprint for record in records}

    def learn(self, evaluations: Sequence[EvaluationRecord]) -> None:
        """Add splits that the search lacks and a user has evaluated: `test`, or those of other tasks."""
        for record in sorted(evaluations, key=lambda one: (one.created_at is None, one.created_at)):
            if record.task in self.tasks or record.split == "test":
                self._fingerprints.setdefault((record.task, record.split), record.task_fingerprint)

    @property
    def others(self) -> tuple[str, ...]:
        """Names of tasks outside the fitness with a `test` split: held out, or evaluated by a user."""
        return tuple(sorted({task for task, split in self._fingerprints if split == "test"} - self.tasks.keys()))

    def of(self, phenotypes: Sequence[str]) -> list[ModelScores]:
        """Return what is stored of some models."""
        search, known = self._search, self._fingerprints
        weights: dict[TaskSplit, float] = {(task, split): self.tasks[task] for split in SCORED for task in self.tasks}
        weights |= {(task, "test"): 0.0 for task in self.others}
        weights = {key: weight for key, weight in weights.items() if key in known}
        prints = sorted({known[key] for key in weights})
        found: dict[str, dict[TaskSplit, EvaluationRecord]] = {}
        for one in self._store.evaluations(phenotypes, search.model_fingerprint, search.engine_fingerprint, prints):
            if known.get((one.task, one.split)) == one.task_fingerprint:
                found.setdefault(one.phenotype_hash, {})[one.task, one.split] = one
        return [ModelScores(search.seed, weights, found.get(phenotype, {})) for phenotype in phenotypes]


def score_of(record: EvaluationRecord) -> Score:
    """Return the score of an evaluation, with the confidence interval of its per-example outcomes."""
    if record.score is None:
        return Score(record.task, record.split, None, failure=record.failure)
    low, high = interval(record) if record.outcomes else (record.score, record.score)
    return Score(record.task, record.split, record.score, low, high, scale=record.scale)


def mean_score(models: Sequence[ModelScores], split: Split, task: str = "") -> Score | None:
    """Return the mean over models of their weighted means over the tasks of the fitness, or of their scores on a task.

    The models are a candidate's with several seeds, or random draws. A failed evaluation scores 0. It is None if a
    model lacks an evaluation, or none has one.
    """
    found = [records for model in models if (records := model.on(split, task)) is not None]
    if len(found) < len(models) or not any(model.is_evaluated(split, task) for model in models):
        return None
    scale = common_scale(record.scale for records in found for record in records if record is not None)
    weights = models[0].weights_on(split, task)
    values = [
        mean_on_scale([0.0 if record is None else record.score or 0.0 for record in records], weights, scale)
        for records in found
    ]
    outcomes = task_outcomes(models, split, task)
    low, high = score_interval(outcomes) if outcomes else (None, None)
    mean = mean_on_scale(values, [1.0] * len(values), scale)
    return Score(task, split, mean, low, high, stdev(values) if len(values) > 1 else None, scale=scale)


def task_outcomes(models: Sequence[ModelScores], split: Split, task: str = "") -> list[TaskOutcomes]:
    """The outcomes behind `mean_score` by task, with a row for each of the models, zeros for a failed evaluation.

    It is empty if a model lacks an evaluation, if all failed on a task, or if they weren't scored on the same examples.
    """
    found = [records for model in models if (records := model.on(split, task)) is not None]
    if not found or len(found) < len(models):
        return []
    pieces = []
    for weight, column in zip(models[0].weights_on(split, task), zip(*found, strict=True), strict=True):
        measured = [record for record in column if record is not None]
        rows = [np.zeros(0) if record is None else outcomes_of(record) for record in column]
        examples = {row.size for row in rows if row.size}
        if len({record.task_fingerprint for record in measured}) != 1 or len(examples) != 1:
            return []
        values = np.stack([row if row.size else np.zeros(max(examples)) for row in rows])
        seeds = tuple(model.seed for model in models)
        pieces.append(TaskOutcomes(values, measured[0].metric, weight, seeds, measured[0].task_fingerprint))
    return pieces


def compare(one: Sequence[ModelScores], other: Sequence[ModelScores], split: Split) -> Significance | None:
    """Test whether two candidates, each with one or more seeds, score the same on a split; see `paired_test`."""
    return paired_test(task_outcomes(one, split), task_outcomes(other, split))
