"""The contract of a fitness: what it needs of a prepared split, and how it scores a model on it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, Literal

from moevolve.evaluators.fitness.engine import Decided, Engine
from moevolve.evaluators.matching.base import cut
from moevolve.evaluators.types import Example, Floats, Matching, Positions, PreparedSplit

Reading = Literal["generation", "choices", "texts", "harness"]
"""How a fitness reads the engine, which determines the forward passes of an evaluation.

`generation`: greedy answers (`Engine.generate`). `choices`: the likelihood of every choice (`Engine.rank`). `texts`:
prompt and answer, if there is one, as one text (`text_logprobs`, `divergences`, `agreements`). `harness`: the requests
of lm-evaluation-harness (`judged`), whose passes can't be planned."""


# Most tokens of answers that are generated one layer at a time. Gold answers run along with their prompts, and most
# answers are decided when they leave them. But where one never is, every further token reads the whole model once, so
# that a candidate takes up to as many times as long as one that is compared on given texts.
SHORT_ANSWER = 16


class Fitness(ABC):
    """One kind of fitness.

    Tasks name it (`fitness: NAME`), and `TASK@NAME` is a task under another fitness. Instances have no state; there is
    one of each in `moevolve.evaluators.fitness.kinds`.

    Attributes:
        metric: Metric, which turns the outcomes into a score.
        reads: Part of the engine that is read. A fitness that reads `choices` needs them in every example.
        needs_references: True if every example needs an accepted answer.
        uses_matching: True if generated answers are compared by the task's `matching`.
        compares: True if predictions on texts are compared with the unedited model's, which the engine must `remember`
            before the model is edited.
        positions: Default of a task's `positions` where it has no answers; only for a fitness that compares.
    """

    name: ClassVar[str]
    metric: ClassVar[str]
    reads: ClassVar[Reading]
    needs_references: ClassVar[bool] = True
    uses_matching: ClassVar[bool] = False
    compares: ClassVar[bool] = False
    positions: ClassVar[Positions] = "text"
    tie_break: ClassVar[str] = "gold log-probability"

    def decodes(self, tokens: int) -> bool:
        """Whether a model needs all its layers at hand to be scored, for answers of up to so many tokens."""
        return self.reads == "harness" or (self.reads == "generation" and tokens > SHORT_ANSWER)

    @abstractmethod
    def outcomes(self, engine: Engine, split: PreparedSplit) -> tuple[Floats, Floats]:
        """Score the engine's model, in its present state, on every example of a split.

        Returns:
            Outcomes in [0, 1] and tie-breakers for equal scores, each float64 [examples] ([windows] for running text).
            The tie-breaker is the gold answer's mean log-probability per token in nats, or the fitness's substitute for
            it; the caller rejects values that aren't finite.

        Raises:
            CandidateError: The model's numbers are not finite.
        """
        ...

    def decided(self, split: PreparedSplit) -> Decided:
        """Return the rule by which decoding of an answer may stop: by default at the first stop string."""
        stop = split.matching.stop
        return lambda _, text: cut(text, stop)[1]

    def problem(self, example: Example, matching: Matching) -> str | None:
        """Say why an example can't be scored; None if it can."""
        return None
