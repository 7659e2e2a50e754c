"""Means and outcomes of one model over seeds, by hand; failed and missing evaluations among them."""

from __future__ import annotations

import numpy as np
import pytest
from store_samples import evaluation

from moevolve.evaluators.types import Split
from moevolve.search.results.outcomes import ModelScores, mean_scores, task_outcomes
from moevolve.store.records import EvaluationRecord

WEIGHTS: dict[tuple[str, Split], float] = {("one", "test"): 1.0, ("two", "test"): 3.0}


def scored(task: str, right: int, of: int = 10) -> EvaluationRecord:
    """An evaluation with so many right answers."""
    outcomes = (np.arange(of) < right).astype("<f4").tobytes()
    return evaluation(0, right / of, task, "test", outcomes=outcomes)


def model(seed: int, *evaluations: EvaluationRecord) -> ModelScores:
    return ModelScores(seed, WEIGHTS, {(each.task, each.split): each for each in evaluations})


def test_scores_are_weighted_means_over_tasks_and_means_over_seeds() -> None:
    models = [model(4, scored("one", 8), scored("two", 4)), model(7, scored("one", 6), scored("two", 8))]
    whole, one, two = mean_scores(models, "test")
    assert (whole.task, whole.score) == ("", pytest.approx(((0.8 + 3 * 0.4) / 4 + (0.6 + 3 * 0.8) / 4) / 2))
    assert [(each.task, each.score) for each in (one, two)] == [
        ("one", pytest.approx(0.7)),
        ("two", pytest.approx(0.6)),
    ]
    assert one.spread == pytest.approx(np.std([0.8, 0.6], ddof=1)) and one.low is not None
    first, second = task_outcomes(models, "test")
    assert (first.seeds, first.weight, second.weight) == ((4, 7), 1.0, 3.0)
    assert first.values.sum(axis=1).tolist() == [8, 6] and second.values.sum(axis=1).tolist() == [4, 8]


def test_a_model_that_failed_on_one_task_scores_0_on_the_whole_split() -> None:
    failed = model(1, evaluation(0, None, "one", "test", failure="broken"))
    models = [model(0, scored("one", 8), scored("two", 4)), failed]
    assert [each.score for each in mean_scores(models, "test")] == pytest.approx([0.25, 0.4, 0.2])
    assert [each.values[1].sum() for each in task_outcomes(models, "test")] == [0, 0]
    # With every seed failed, the number of examples isn't known.
    assert task_outcomes([failed], "test") == [] and mean_scores([failed], "test")[0].low is None


def test_nothing_is_compared_where_evaluations_are_missing_or_of_other_examples() -> None:
    whole = model(0, scored("one", 8), scored("two", 4))
    for other in (model(1, scored("one", 8)), model(1)):
        assert mean_scores([whole, other], "test") == [] == task_outcomes([whole, other], "test")
    longer = model(1, scored("one", 8, of=20), scored("two", 4))
    assert task_outcomes([whole, longer], "test") == []
    assert mean_scores([], "test") == [] == task_outcomes([], "test")
