"""`perplexity`: how likely the model finds whole texts."""

from __future__ import annotations

import numpy as np

from moevolve.evaluators.fitness.base import Fitness, Floats, require_all
from moevolve.evaluators.fitness.engine import Engine
from moevolve.evaluators.types import PreparedSplit


class Perplexity(Fitness):
    """The reciprocal of its outcomes' geometric mean.

    Of examples that are read one by one, each counts the same, however long. Of windows, which all predict equally many
    tokens, it is the perplexity per token as papers report it: exp of the mean negative log-likelihood.
    """

    name = "perplexity"
    metric = "geometric_mean"
    reads = "texts"
    needs_references = False

    def outcomes(self, engine: Engine, split: PreparedSplit) -> tuple[Floats, Floats]:
        """See `Fitness.outcomes`: exp(mean log-probability per token) of the texts, and its logarithm."""
        logprobs = require_all(engine.text_logprobs(split), split)
        return np.exp(logprobs), logprobs
