"""Scores and outcomes of one model over seeds, as studies, comparisons and pages of individuals show and test them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import stdev

import numpy as np

from moevolve.evaluators.metrics import mean_on_scale
from moevolve.evaluators.scales import ScaleName, common_scale
from moevolve.evaluators.types import SCORED, Split
from moevolve.search.loop.final_table import Score
from moevolve.search.loop.scores import outcomes_of
from moevolve.search.loop.significance import TaskOutcomes, score_interval
from moevolve.store.reader import StoreReader
from moevolve.store.records import EvaluationRecord, SearchRecord


@dataclass(frozen=True, slots=True)
class ModelScores:
    """What one search has measured of one model: an individual, or the full model.

    Attributes:
        weights: Weights of the tasks of the fitness, by task and split.
        evaluations: The model's evaluations on them, as far as they are stored.
    """

    seed: int
    weights: Mapping[tuple[str, Split], float]
    evaluations: Mapping[tuple[str, Split], EvaluationRecord] = field(repr=False)

    def on(self, split: Split) -> list[EvaluationRecord | None] | None:
        """The evaluation on every task of a split, None for a failed one; None if one is missing.

        A candidate that fails on one task of a split isn't evaluated on the tasks after it: it failed on all of them.
        """
        found = [self.evaluations.get(key) for key in self.weights if key[1] == split]
        if any(record is not None and record.failure is not None for record in found):
            return [None if record is None or record.failure is not None else record for record in found]
        return None if None in found else found


def model_scores(store: StoreReader, search: SearchRecord, phenotype: str) -> ModelScores:
    """Read what is stored of a phenotype on the `search`, `dev` and `test` splits of a search's own tasks."""
    tasks = [task for task in store.search_tasks(search.id) if task.split in SCORED]
    fingerprints = [task.task_fingerprint for task in tasks]
    found = store.evaluations(phenotype, search.model_fingerprint, search.engine_fingerprint, fingerprints)
    known = {record.task_fingerprint: record for record in found}
    return ModelScores(
        search.seed,
        {(task.task, task.split): task.weight for task in tasks},
        {(task.task, task.split): known[task.task_fingerprint] for task in tasks if task.task_fingerprint in known},
    )


def task_outcomes(models: Sequence[ModelScores], split: Split) -> list[TaskOutcomes]:
    """The outcomes on every task of a split, with a row for each of the models, zeros for a failed evaluation.

    It is empty if a model lacks an evaluation, if all failed on a task, or if they weren't scored on the same examples.
    """
    found = [model.on(split) for model in models]
    if not found or None in found:
        return []
    weights = [weight for (_, of), weight in models[0].weights.items() if of == split]
    pieces = []
    for weight, records in zip(weights, zip(*(each for each in found if each is not None), strict=True), strict=True):
        measured = [record for record in records if record is not None]
        rows = [np.zeros(0) if record is None else outcomes_of(record) for record in records]
        examples = {row.size for row in rows if row.size}
        if len({record.task_fingerprint for record in measured}) != 1 or len(examples) != 1:
            return []
        values = np.stack([row if row.size else np.zeros(max(examples)) for row in rows])
        seeds = tuple(model.seed for model in models)
        pieces.append(TaskOutcomes(values, measured[0].metric, weight, seeds, measured[0].task_fingerprint))
    return pieces


def mean_scores(models: Sequence[ModelScores], split: Split) -> list[Score]:
    """The weighted mean over tasks, then the score on each task if there are several; means over the models' seeds.

    A failed evaluation scores 0. It is empty if a model lacks an evaluation.
    """
    found = [records for model in models if (records := model.on(split)) is not None]
    weights = {task: weight for (task, of), weight in models[0].weights.items() if of == split} if models else {}
    if not weights or len(found) < len(models):
        return []
    values = [[0.0 if record is None else record.score or 0.0 for record in records] for records in found]
    outcomes = task_outcomes(models, split)
    columns = zip(*found, strict=True)
    scales = [common_scale(record.scale for record in column if record is not None) for column in columns]
    scale = common_scale(scales)
    means = [mean_on_scale(row, [*weights.values()], scale) for row in values]
    scores = [_mean("", split, means, outcomes, scale)]
    for place, task in enumerate(weights if len(weights) > 1 else ()):
        own = [row[place] for row in values]
        scores.append(_mean(task, split, own, outcomes[place : place + 1], scales[place]))
    return scores


def _mean(
    task: str, split: Split, values: Sequence[float], outcomes: Sequence[TaskOutcomes], scale: ScaleName
) -> Score:
    low, high = score_interval(outcomes) if outcomes else (None, None)
    score = mean_on_scale(values, [1.0] * len(values), scale)
    return Score(task, split, score, low, high, stdev(values) if len(values) > 1 else None, scale=scale)
