"""From a candidate's evaluations to the numbers it is ranked by."""

from __future__ import annotations

from moevolve.evaluators.metrics import weighted_mean
from moevolve.search.plan import Plan
from moevolve.store.records import EvaluationRecord


def ranking_values(plan: Plan, evaluations: tuple[EvaluationRecord, ...]) -> tuple[float, float]:
    """Score and tie-break of a candidate from its evaluations on the splits of one name, in the order of its job.

    The tie-break is what the configuration's `tie_break` says: the mean gold log-probability, the mean agreement with
    the full model, or always 0, so that the index decides.
    """
    found = {record.task_fingerprint: record for record in evaluations}
    score, tie_break = weighted_means(evaluations[: len(plan.weights)], plan.weights)
    if plan.config.tie_break == "agreement":
        ties = plan.tie_splits(evaluations[0].split)
        tie_break, _ = weighted_means(tuple(found[split.fingerprint] for split in ties), plan.weights)
    elif plan.config.tie_break == "index":
        tie_break = 0.0
    return score, tie_break


def weighted_means(evaluations: tuple[EvaluationRecord, ...], weights: tuple[float, ...]) -> tuple[float, float]:
    """Weighted means of score and gold log-probability over tasks, in the order of the weights."""
    scores = [record.score or 0.0 for record in evaluations]
    return weighted_mean(scores, weights), weighted_mean(
        [record.gold_logprob or 0.0 for record in evaluations], weights
    )
