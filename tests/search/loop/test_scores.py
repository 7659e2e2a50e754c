"""Means and outcomes of one model over seeds, by hand; failed and missing evaluations among them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from store_samples import evaluation

from moevolve.evaluators.types import Split
from moevolve.search.loop.scores import ModelScores, mean_score, task_outcomes
from moevolve.store.records import EvaluationRecord

WEIGHTS: dict[tuple[str, Split], float] = {("one", "test"): 1.0, ("two", "test"): 3.0}


def scored(task: str, right: int, of: int = 10) -> EvaluationRecord:
    """An evaluation with so many right answers."""
    outcomes = (np.arange(of) < right).astype("<f4").tobytes()
    return evaluation(0, right / of, task, "test", outcomes=outcomes)


def model(seed: int, *evaluations: EvaluationRecord) -> ModelScores:
    return ModelScores(seed, WEIGHTS, {(each.task, each.split): each for each in evaluations})


def mean(models: list[ModelScores], task: str = "") -> float | None:
    found = mean_score(models, "test", task)
    return None if found is None else found.score


def test_scores_are_weighted_means_over_tasks_and_means_over_seeds() -> None:
    models = [model(4, scored("one", 8), scored("two", 4)), model(7, scored("one", 6), scored("two", 8))]
    assert mean(models) == pytest.approx(((0.8 + 3 * 0.4) / 4 + (0.6 + 3 * 0.8) / 4) / 2)
    assert mean(models, "one") == pytest.approx(0.7) and mean(models, "two") == pytest.approx(0.6)
    one = mean_score(models, "test", "one")
    assert one is not None and one.spread == pytest.approx(np.std([0.8, 0.6], ddof=1)) and one.low is not None
    first, second = task_outcomes(models, "test")
    assert (first.seeds, first.weight, second.weight) == ((4, 7), 1.0, 3.0)
    assert first.values.sum(axis=1).tolist() == [8, 6] and second.values.sum(axis=1).tolist() == [4, 8]


def test_a_model_that_failed_on_one_task_scores_0_on_the_whole_split() -> None:
    failed = model(1, evaluation(0, None, "one", "test", failure="broken"))
    models = [model(0, scored("one", 8), scored("two", 4)), failed]
    assert [mean(models, task) for task in ("", "one", "two")] == pytest.approx([0.25, 0.4, 0.2])
    assert [each.failure for each in failed.scores] == ["broken", "broken"]
    assert [each.values[1].sum() for each in task_outcomes(models, "test")] == [0, 0]
    # With every seed failed, the number of examples isn't known.
    alone = mean_score([failed], "test")
    assert task_outcomes([failed], "test") == [] and alone is not None and (alone.score, alone.low) == (0, None)


def test_nothing_is_compared_where_evaluations_are_missing_or_of_other_examples() -> None:
    whole = model(0, scored("one", 8), scored("two", 4))
    for other in (model(1, scored("one", 8)), model(1)):
        assert mean([whole, other]) is None and task_outcomes([whole, other], "test") == []
    longer = model(1, scored("one", 8, of=20), scored("two", 4))
    assert task_outcomes([whole, longer], "test") == []
    assert mean([]) is None and task_outcomes([], "test") == []


def test_perplexities_are_averaged_by_their_logarithms() -> None:
    both = [ModelScores(0, WEIGHTS, {("one", "test"): texts(score)}) for score in (1 / 20, 1 / 200)]
    assert 1 / (mean(both, "one") or 0) == pytest.approx((20 * 200) ** 0.5)
    failed = ModelScores(0, WEIGHTS, {}, failed=True)
    assert mean([both[0], failed], "one") == 0 and mean([failed], "one") is None


def texts(score: float) -> EvaluationRecord:
    """An evaluation with a perplexity."""
    return replace(evaluation(0, score, "one", "test"), metric="inverse_perplexity")
