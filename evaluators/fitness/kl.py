"""`kl`: how far the predictions are from the unedited model's, by their Kullback-Leibler divergence."""

from __future__ import annotations

import numpy as np

from moevolve.evaluators.fitness.base import Fitness, Floats, require_all
from moevolve.evaluators.fitness.engine import Engine
from moevolve.evaluators.types import PreparedSplit


class Kl(Fitness):
    """Needs no labels. The unedited model's own score is 1."""

    name = "kl"
    metric = "geometric_mean"
    reads = "texts"
    needs_references = False
    compares = True
    tie_break = "divergence"

    def outcomes(self, engine: Engine, split: PreparedSplit) -> tuple[Floats, Floats]:
        """See `Fitness.outcomes`: exp(-mean divergence per token), and its logarithm."""
        logs = require_all(0.0 - engine.divergences(split), split)
        return np.exp(logs), logs
