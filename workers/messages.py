"""Typed messages between the driver and the workers. They flow one way each: requests down, replies up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from moevolve.evaluators.types import Split, SplitResult
from moevolve.workers.methods.base import Edit

FailureKind = Literal["candidate", "worker", "timeout"]
"""Whose fault a failure is. `candidate`: the edit's own (an exception, numbers that aren't finite), wherever tried.
`worker`: its workers died or had to be retired, again and again. `timeout`: it ran past the limit."""


@dataclass(frozen=True, slots=True)
class EvaluationRequest:
    """Score one edit on some prepared splits.

    Attributes:
        ticket: the driver's key of this request; replies carry it back, so a repeated reply is harmless.
        edit: what to do to the resident model.
        splits: fingerprints of the prepared splits, in order.
    """

    ticket: str
    edit: Edit
    splits: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class TaskResult:
    """One split's outcome, with the identity of what was scored.

    Attributes:
        seconds: on the worker.
        spared: share of the layers' work on prompts, in [0, 1], that earlier candidates' hidden states made needless.
    """

    task: str
    split: Split
    task_fingerprint: str
    result: SplitResult
    seconds: float
    spared: float = 0.0


@dataclass(frozen=True, slots=True)
class EvaluationReply:
    """What a worker found.

    Attributes:
        results: of the requested splits, in order; those before the one it failed on where it failed.
        failure: the reason it failed, else None.
        worker: who did it (for the record only).
        kind: whose fault the failure is.
        failed_on: fingerprints of the splits that a candidate's own failure is about; those that are neither here nor
            among the results were not tried.
    """

    ticket: str
    results: tuple[TaskResult, ...]
    failure: str | None
    seconds: float
    worker: str
    kind: FailureKind = "candidate"
    failed_on: tuple[str, ...] = ()
