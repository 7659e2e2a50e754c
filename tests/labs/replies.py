"""Replies of workers, made by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from moevolve.evaluators.errors import FailureKind
from moevolve.evaluators.types import SplitResult
from moevolve.workers.contract.messages import EvaluationReply, EvaluationRequest

HALF_RIGHT = (1, 0)


def result(
    score: float = 0.5, gold: float = -1.0, outcomes: Sequence[float] = HALF_RIGHT, seconds: float = 0.1
) -> SplitResult:
    return SplitResult(score, gold, np.array(outcomes, dtype=np.float32), seconds)


def answer(
    request: EvaluationRequest,
    score: float = 0.5,
    gold: float = -1.0,
    outcomes: Sequence[float] = HALF_RIGHT,
    attempts: int = 1,
) -> EvaluationReply:
    """The same result on every split."""
    return answers(request, dict.fromkeys(request.fingerprints, result(score, gold, outcomes)), attempts)


def answers(request: EvaluationRequest, results: Mapping[str, SplitResult], attempts: int = 1) -> EvaluationReply:
    """Results by fingerprint."""
    return EvaluationReply(request.ticket, results, None, 0.1, "w", attempts=attempts)


def failure(
    request: EvaluationRequest, on: str | None = None, reason: str = "logits are not finite", score: float = 0.5
) -> EvaluationReply:
    """The candidate fails on the split of this fingerprint, with those before it scored; on all of them if None."""
    before = () if on is None else request.fingerprints[: request.fingerprints.index(on)]
    failed_on = request.fingerprints if on is None else (on,)
    return EvaluationReply(
        request.ticket, {key: result(score) for key in before}, reason, 0.1, "w", failed_on=failed_on
    )


def loss(request: EvaluationRequest, kind: FailureKind, reason: str = "gone 3 times") -> EvaluationReply:
    """Its workers died, or time ran out."""
    return EvaluationReply(request.ticket, {}, reason, 0.1, "w", kind, attempts=3)
