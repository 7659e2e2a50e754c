"""`agreement`: how much the predictions have in common with the unedited model's."""

from __future__ import annotations

import numpy as np

from moevolve.evaluators.fitness.base import Fitness, Floats, require_all
from moevolve.evaluators.fitness.engine import Engine
from moevolve.evaluators.types import PreparedSplit

_LEAST = 1e-12
"""Agreement whose logarithm stands for everything below it."""


class Agreement(Fitness):
    """Needs no labels. The unedited model's own score is 1."""

    name = "agreement"
    metric = "mean"
    reads = "texts"
    needs_references = False
    compares = True
    positions = "greedy"
    tie_break = "agreement"

    def outcomes(self, engine: Engine, split: PreparedSplit) -> tuple[Floats, Floats]:
        """See `Fitness.outcomes`: the agreement, and its logarithm.

        It is the mean per token of sum_v min(p(v), q(v)) of the unedited model's p and the model's q, which is 1 less
        their total variation distance.
        """
        overlaps = require_all(engine.agreements(split), split)
        # Nothing in common at all is a bad score, not a failure: its logarithm stays finite.
        return overlaps, np.log(np.maximum(overlaps, _LEAST))
