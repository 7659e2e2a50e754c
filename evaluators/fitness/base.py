"""The contract of a fitness: what makes a candidate's score on a prepared split, and what it needs for that."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from moevolve.evaluators.fitness.engine import Decided, Engine
from moevolve.evaluators.matching.base import cut
from moevolve.evaluators.types import Example, Matching, Positions, PreparedSplit

Floats = NDArray[np.float64]

Reading = Literal["generation", "choices", "texts", "harness"]
"""How a fitness reads the engine, which says what passes an evaluation takes.

`generation`: greedy answers (`Engine.generate`). `choices`: likelihoods of every choice (`Engine.rank`). `texts`: the
prompt with the answer behind it, if there is one, as one text (`text_logprobs`, `divergences`, `agreements`).
`harness`: what lm-evaluation-harness asks for (`judged`); its passes can't be planned."""


class Fitness(ABC):
    """One kind of fitness. A task names it (`fitness: NAME`), and any task can be had under it (`TASK@NAME`).

    Instances have no state: `moevolve.evaluators.fitness.registry` holds one of each.

    Attributes:
        name: what tasks call it.
        metric: name of the metric that makes the score of its outcomes unless the task says otherwise.
        reads: how it reads the engine. A fitness that reads choices can't do without them.
        needs_references: whether every example needs an accepted answer.
        uses_matching: whether it compares generated answers by the task's `matching`.
        compares: whether it compares predictions on texts with the unedited model's, which the engine must `remember`
            before anything is edited.
        positions: for one that compares: whose predictions those are where the task has no answers and doesn't say.
        tie_break: what its second result is, for messages.
    """

    name: ClassVar[str]
    metric: ClassVar[str]
    reads: ClassVar[Reading]
    needs_references: ClassVar[bool] = True
    uses_matching: ClassVar[bool] = False
    compares: ClassVar[bool] = False
    positions: ClassVar[Positions] = "text"
    tie_break: ClassVar[str] = "gold log-probability"

    @abstractmethod
    def outcomes(self, engine: Engine, split: PreparedSplit) -> tuple[Floats, Floats]:
        """Outcomes of the engine's model, as it is now, on a split.

        Returns:
            Each example's outcome in [0, 1] (of running text each window's), and what breaks ties between equal scores:
            the gold answer's mean log-probability per token in nats, or what the fitness has in its place. Both float64
            [examples]; the caller refuses tie-breakers that aren't finite.

        Raises:
            CandidateError: numbers that aren't finite.
            ValueError: the engine did not answer every example.
        """
        ...

    def decided(self, split: PreparedSplit) -> Decided:
        """When decoding of an answer may stop, for one that reads generations: by default at the first stop string."""
        stop = split.matching.stop
        return lambda _, text: cut(text, stop)[1]

    def problem(self, example: Example, matching: Matching) -> str | None:
        """Why an example can't be scored, or None."""
        return None


def require_all(values: Floats, split: PreparedSplit) -> Floats:
    """Returns one value per example; windows of running text are as many as the tokenizer makes of it.

    Raises:
        ValueError: the engine gave fewer or more.
    """
    if split.window is None and values.shape != (len(split.examples),):
        raise ValueError(
            f"the engine scored {values.shape[0]} of {len(split.examples)} texts of {split.task}/{split.split}"
        )
    return values
