"""Numbers computed from evaluations: a candidate's fitness and tie-break, means over tasks, and intervals."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from moevolve.evaluators.errors import UserError
from moevolve.evaluators.metrics import confidence_interval, mean_on_scale, weighted_mean
from moevolve.evaluators.scales import common_scale
from moevolve.search.config.files import parse_stored_config
from moevolve.search.config.run import RunConfig
from moevolve.store.reader import StoreReader
from moevolve.store.records import FULL_MODEL, EvaluationRecord, SearchRecord

FULL = "full"
"""Name of the unedited model in place of an individual's."""


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
    """The same evaluation with its per-example outcomes."""
    return store.evaluations(
        record.phenotype_hash, record.model_fingerprint, record.engine_fingerprint, [record.task_fingerprint]
    )[0]


def full_fitness(store: StoreReader, search: SearchRecord) -> float | None:
    """Fitness of a search's unedited model; None if it isn't evaluated yet, or another version stored the search."""
    tasks = [task for task in store.search_tasks(search.id) if task.split == "search"]
    wanted = [task.task_fingerprint for task in tasks]
    records = store.evaluations(FULL_MODEL, search.model_fingerprint, search.engine_fingerprint, wanted)
    found = {record.task_fingerprint: record for record in records}
    if not tasks or any(fingerprint not in found for fingerprint in wanted):
        return None
    records = [found[fingerprint] for fingerprint in wanted]
    try:
        return ranking_of(parse_stored_config(search.config), [task.weight for task in tasks], records, records)[0]
    except UserError:
        return None
