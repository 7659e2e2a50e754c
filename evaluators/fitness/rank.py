"""`rank`: right when the likeliest choice is an accepted answer."""

from __future__ import annotations

import numpy as np

from moevolve.evaluators.errors import CandidateError
from moevolve.evaluators.fitness.base import Fitness, Floats
from moevolve.evaluators.fitness.engine import Engine
from moevolve.evaluators.types import Example, Matching, PreparedSplit


class Rank(Fitness):
    """Likelihoods are mean log-probabilities per token; the first wins a tie."""

    name = "rank"
    metric = "accuracy"
    reads = "choices"

    def outcomes(self, engine: Engine, split: PreparedSplit) -> tuple[Floats, Floats]:
        """See `Fitness.outcomes`: 1 or 0."""
        ranked = engine.rank(split)
        if [len(values) for values in ranked] != [len(example.choices) for example in split.examples]:
            raise ValueError(f"the engine did not rank every choice of every example of {split.task}/{split.split}")
        outcomes = np.empty(len(ranked))
        gold = np.empty(len(ranked))
        for i, (values, example) in enumerate(zip(ranked, split.examples, strict=True)):
            if not np.isfinite(values).all():
                raise CandidateError(f"{split.task}/{split.split}: log-likelihoods of example {i} are not finite")
            outcomes[i] = example.choices[int(np.argmax(values))] in example.references
            gold[i] = values[example.choices.index(example.references[0])]
        return outcomes, gold

    def problem(self, example: Example, matching: Matching) -> str | None:
        """See `Fitness.problem`."""
        if len(set(example.choices)) < max(2, len(example.choices)):
            return f"ranking needs at least two different choices, got {list(example.choices)}"
        return None
