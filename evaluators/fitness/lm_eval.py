"""`lm_eval`: what lm-evaluation-harness makes of the answers to its own tasks."""

from __future__ import annotations

from moevolve.evaluators.fitness.base import Fitness, Floats
from moevolve.evaluators.fitness.engine import Engine
from moevolve.evaluators.types import PreparedSplit


class LmEval(Fitness):
    """For tasks of lm-evaluation-harness alone (`moevolve.evaluators.harness`), and their own fitness."""

    name = "lm_eval"
    metric = "mean"
    reads = "harness"

    def outcomes(self, engine: Engine, split: PreparedSplit) -> tuple[Floats, Floats]:
        """See `Fitness.outcomes`."""
        return engine.judged(split)
