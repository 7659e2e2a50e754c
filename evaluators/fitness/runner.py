"""Scoring whatever model the engine holds on one prepared split."""

from __future__ import annotations

import numpy as np

from moevolve.evaluators.errors import CandidateError
from moevolve.evaluators.fitness.engine import Engine
from moevolve.evaluators.fitness.registry import FITNESSES
from moevolve.evaluators.metrics import score
from moevolve.evaluators.types import PreparedSplit, SplitResult


def run_split(engine: Engine, split: PreparedSplit) -> SplitResult:
    """Scores the engine's model on a split, by the split's fitness.

    Args:
        engine: must have remembered the split where its fitness compares.
        split: prepared.

    Raises:
        CandidateError: a log-probability is not finite, which is the candidate's fault.
        ValueError: the engine did not answer every example.
    """
    fitness = FITNESSES[split.fitness]
    outcomes, gold = fitness.outcomes(engine, split)
    wrong = np.flatnonzero(~np.isfinite(gold))
    if wrong.size:
        raise CandidateError(
            f"{split.task}/{split.split}: {fitness.tie_break} of example {int(wrong[0])} is {gold[wrong[0]]} "
            f"({wrong.size} of {gold.size} not finite)"
        )
    return SplitResult(
        score=score(split.metric, outcomes),
        gold_logprob=score("mean", gold),
        outcomes=outcomes.astype(np.float32),
    )
