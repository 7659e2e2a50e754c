"""What the full model makes of the data before a search, by the kind of fitness."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from known_experts import known_split, save_known_model

from moevolve.evaluators.fitness.kinds import FITNESSES
from moevolve.evaluators.types import PreparedSplit
from moevolve.search.shrink.findings import TaskLook
from moevolve.search.shrink.first_look import first_look, wrong_task
from moevolve.workers.contract.settings import EngineConfig, ModelConfig


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    """A model that goes on with English and German, and answers with tool calls."""
    folder = tmp_path_factory.mktemp("known")
    save_known_model(folder)
    return ModelConfig(str(folder), device="cpu")


def looked(model: ModelConfig, split: PreparedSplit) -> tuple[TaskLook, ...]:
    """A look at one task, without a process of its own."""

    def call(function: Callable[..., Any], *given: Any) -> Any:
        return function(*given)

    section: Any = SimpleNamespace(prepared_splits=lambda *_, **__: {"search": split, "calibration": split}, weight=1.0)
    config: Any = SimpleNamespace(model=model, engine=EngineConfig(), tasks=[section])
    probe: Any = SimpleNamespace(call=call)
    return first_look(config, probe)


def under(fitness: str, **changes: Any) -> PreparedSplit:
    """English sentences under a fitness."""
    return replace(known_split("english"), fitness=fitness, metric=FITNESSES[fitness].metric, **changes)


@pytest.mark.parametrize("metric", ["accuracy", "mean"])
def test_answers_that_are_wrong_are_refused_whatever_grades_them(model: ModelConfig, metric: str) -> None:
    right = known_split("english")
    wrong = tuple(replace(example, references=("Wort1",)) for example in right.examples)
    split = replace(under("generate"), metric=metric, max_new_tokens=2, examples=wrong)
    found = looked(model, split)
    (task,) = found
    assert (task.score, task.least, task.rows) == (0.0, 0.2, len(wrong))
    assert "the full model scores 0.0 % on" in (wrong_task(found) or "") and len(task.examples) == 3
    unseen = (replace(task, examples=()),)
    assert "; write the answers as the model does" in (wrong_task(unseen) or ""), "lm-eval's answers aren't shown"


def test_a_perplexity_is_shown_with_texts_and_refused_only_if_guessing_is_better(model: ModelConfig) -> None:
    split = under("perplexity")
    found = looked(model, split)
    (task,) = found
    assert task.score is not None and 0 < task.least < task.score and wrong_task(found) is None
    line, *texts = task.lines()
    assert f"the full model has {1 / task.score:.3f} ppl on" in line and len(texts) == 3
    assert texts[0].startswith(f"  {split.examples[0].prompt!r} has ") and texts[0].endswith(" ppl")
    worse = (replace(task, score=task.least / 2),)
    assert f"it can't predict {split.examples[0].prompt!r} has " in (wrong_task(worse) or "")


def test_answers_that_are_compared_are_shown_without_a_score(model: ModelConfig) -> None:
    found = looked(model, under("agreement", positions="answer"))
    (task,) = found
    assert task.score is None and len(task.examples) == 3 and wrong_task(found) is None
    assert task.lines()[0].endswith("candidates are compared with the full model")


def test_the_model_is_given_up_before_the_same_process_loads_it_for_the_search(model: ModelConfig) -> None:
    from transformers import PreTrainedModel

    def held() -> int:
        return sum(issubclass(type(each), PreTrainedModel) for each in gc.get_objects())

    gc.collect()
    before = held()
    looked(model, under("generate"))
    assert held() <= before
