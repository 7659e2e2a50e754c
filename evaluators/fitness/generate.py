"""`generate`: greedy answers compared with the references by the task's matcher, the protocol of the EEP paper."""

from __future__ import annotations

import numpy as np

from moevolve.evaluators.fitness.base import Fitness, Floats
from moevolve.evaluators.fitness.engine import Decided, Engine
from moevolve.evaluators.matching.registry import make_matcher
from moevolve.evaluators.types import Example, Matching, PreparedSplit


class Generate(Fitness):
    """Source: EEP (arXiv 2407.00945), Sec. 4 and App. E."""

    name = "generate"
    metric = "accuracy"
    reads = "generation"
    uses_matching = True

    def outcomes(self, engine: Engine, split: PreparedSplit) -> tuple[Floats, Floats]:
        """See `Fitness.outcomes`: how right each answer is."""
        examples = split.examples
        answers = engine.generate(split, self.decided(split))
        if len(answers.texts) != len(examples) or answers.gold_logprobs.shape != (len(examples),):
            raise ValueError(
                f"the engine gave {len(answers.texts)} answers and {answers.gold_logprobs.shape[0]} log-probabilities "
                f"for {len(examples)} examples of {split.task}/{split.split}"
            )
        matcher = make_matcher(split.matching)
        matches = [matcher.match(text, example) for text, example in zip(answers.texts, examples, strict=True)]
        return np.array(matches, dtype=np.float64), np.asarray(answers.gold_logprobs, dtype=np.float64)

    def decided(self, split: PreparedSplit) -> Decided:
        """See `Fitness.decided`: as soon as no continuation can change the match."""
        matcher, examples = make_matcher(split.matching), split.examples
        return lambda i, text: matcher.decided(text, examples[i])

    def problem(self, example: Example, matching: Matching) -> str | None:
        """See `Fitness.problem`."""
        return make_matcher(matching).problem(example)
