"""Numbers computed from evaluations: a candidate's fitness and tie-break, means over tasks, and intervals."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from moevolve.evaluators.metrics import confidence_interval, weighted_mean
from moevolve.search.config.run import RunConfig
from moevolve.store.reader import StoreReader
from moevolve.store.records import EvaluationRecord, SearchRecord
from moevolve.workers.contract.edits import IdentityEdit

FULL = "full"
"""Name of the unedited model in place of an individual's."""


def ranking_of(
    config: RunConfig, weights: Sequence[float], evaluations: Sequence[EvaluationRecord]
) -> tuple[float, float]:
    """Score of a candidate, and its tie-break by the configuration's criterion: 0 with `index`.

    Args:
        config: The search's configuration.
        weights: Weights of the tasks.
        evaluations: The candidate's evaluations on one split, one per task.
    """
    score, gold_logprob = weighted_means(evaluations, weights)
    return score, gold_logprob if config.tie_break == "gold_logprob" else 0.0


def weighted_means(evaluations: Sequence[EvaluationRecord], weights: Sequence[float]) -> tuple[float, float]:
    """Weighted means of score and gold log-probability over tasks, in the order of the weights."""
    scores = [record.score or 0.0 for record in evaluations]
    return weighted_mean(scores, weights), weighted_mean(
        [record.gold_logprob or 0.0 for record in evaluations], weights
    )


def outcomes_of(record: EvaluationRecord) -> NDArray[np.float64]:
    """Per-example outcomes of a stored evaluation: float64 [examples]; empty if they were not kept."""
    return np.frombuffer(record.outcomes or b"", dtype="<f4").astype(np.float64)


def interval(record: EvaluationRecord) -> tuple[float, float]:
    """95 % confidence interval of a stored evaluation's score, from its per-example outcomes."""
    return confidence_interval(outcomes_of(record), metric=record.metric)


def with_outcomes(store: StoreReader, record: EvaluationRecord) -> EvaluationRecord:
    """The same evaluation with its per-example outcomes."""
    return store.evaluations(
        record.phenotype_hash, record.model_fingerprint, record.engine_fingerprint, [record.task_fingerprint]
    )[0]


def full_fitness(store: StoreReader, search: SearchRecord) -> float | None:
    """Fitness of a search's unedited model; None if it isn't evaluated yet."""
    tasks = [task for task in store.search_tasks(search.id) if task.split == "search"]
    found = {
        record.task_fingerprint: record
        for record in store.evaluations(
            IdentityEdit().phenotype_hash,
            search.model_fingerprint,
            search.engine_fingerprint,
            [task.task_fingerprint for task in tasks],
        )
    }
    if not tasks or any(task.task_fingerprint not in found for task in tasks):
        return None
    records = tuple(found[task.task_fingerprint] for task in tasks)
    return weighted_means(records, tuple(task.weight for task in tasks))[0]
