"""The contract of a fitness, tested for all kinds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest

from moevolve.evaluators.fitness.base import Reading
from moevolve.evaluators.fitness.engine import Generation
from moevolve.evaluators.fitness.kinds import DEFAULT_FITNESS, FITNESSES, task_fitnesses
from moevolve.evaluators.fitness.scoring import run_split
from moevolve.evaluators.metrics import METRICS
from moevolve.evaluators.preparation.prepare import prepare_split
from moevolve.evaluators.preparation.registry import load_task

WriteTask = Callable[..., Path]


READ_BY = {"generate": "generation", "rank": "choices", "text_logprobs": "texts", "divergences": "texts"}
READ_BY |= {"agreements": "texts", "judged": "harness"}


class EvenEngine:
    """Gives the same answer to every example, and records how it was read."""

    def __init__(self, examples: int) -> None:
        self.read = ""
        self._answers = {
            "generate": Generation(("A",) * examples, np.full(examples, -0.5)),
            "rank": tuple(np.array([-0.5, -1.0]) for _ in range(examples)),
            "text_logprobs": np.full(examples, -0.5),
            "divergences": np.full(examples, 0.5),
            "agreements": np.full(examples, 0.5),
        }

    def __getattr__(self, name: str) -> Callable[..., Any]:
        self.read = READ_BY[name]
        return lambda *_: self._answers[name]


def test_what_it_says_of_itself_fits_together() -> None:
    for name, fitness in FITNESSES.items():
        assert fitness.name == name
        assert fitness.metric in METRICS
        assert fitness.reads in get_args(Reading)
        assert fitness.reads == "texts" or not fitness.compares, "texts are what is remembered"
        assert fitness.reads == "generation" or not fitness.uses_matching
        assert fitness.reads != "choices" or fitness.needs_references
    assert DEFAULT_FITNESS in task_fitnesses()
    assert set(FITNESSES) - set(task_fitnesses()) == {"lm_eval"}


@pytest.mark.parametrize("name", task_fitnesses())
def test_it_reads_the_engine_as_it_says(name: str, write_task: WriteTask) -> None:
    split = prepare_split(load_task(f"{write_task()}@{name}"), "search")
    engine = EvenEngine(len(split.examples))
    result = run_split(engine, split)
    assert engine.read == FITNESSES[name].reads
    assert result.outcomes.shape == (len(split.examples),)
    assert 0 <= result.outcomes.min() <= result.outcomes.max() <= 1
    assert 0 <= result.score <= 1 and np.isfinite(result.gold_logprob)
    decided = FITNESSES[name].decided(split)
    assert decided(0, "whatever\n") and not decided(0, "")
    with pytest.raises(ValueError, match=rf"small@{name}/search|zip\(\) argument"):
        run_split(EvenEngine(len(split.examples) - 1), split)
