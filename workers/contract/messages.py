"""Typed messages between the driver and the workers. They flow one way each: requests down, replies up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from moevolve.evaluators.types import SplitRef, SplitResult
from moevolve.workers.contract.edits import Edit

FailureKind = Literal["candidate", "worker", "timeout"]
"""Whose fault a failure is. `candidate`: the edit's own (an exception, numbers that aren't finite), wherever tried.
`worker`: its workers died or had to be retired, again and again. `timeout`: it ran past the limit."""


@dataclass(frozen=True, slots=True)
class EvaluationRequest:
    """Score one edit on some prepared splits.

    Attributes:
        edit: what to do to the resident model.
        splits: where to score it, in order.
        experts, active, parameters: of the model that the edit makes, for the record; None for the full model.
        ticket: the key of a request that is under way; its reply carries it back, so a repeated reply is harmless.
    """

    edit: Edit
    splits: tuple[SplitRef, ...]
    experts: int | None = None
    active: int | None = None
    parameters: int | None = None
    ticket: str = ""

    @property
    def fingerprints(self) -> tuple[str, ...]:
        """Of the splits, in order."""
        return tuple(split.fingerprint for split in self.splits)

    @property
    def key(self) -> tuple[str, tuple[str, ...]]:
        """What is asked: requests of equal key have equal answers."""
        return self.edit.phenotype_hash, self.fingerprints


@dataclass(frozen=True, slots=True)
class EvaluationReply:
    """What a worker found, or why there is nothing.

    Attributes:
        ticket: of the request.
        results: by the fingerprint of the split, in order; those before the one it failed on where it failed.
        failure: the reason it failed, else None.
        seconds: in all, the edit included.
        worker: who did it (for the record only).
        kind: whose fault the failure is.
        failed_on: fingerprints of the splits that a candidate's own failure is about; those that are neither here nor
            among the results were not tried.
        attempts: how many tries it took; the pool counts them.
    """

    ticket: str
    results: Mapping[str, SplitResult] = field(repr=False)
    failure: str | None
    seconds: float
    worker: str
    kind: FailureKind = "candidate"
    failed_on: tuple[str, ...] = ()
    attempts: int = 1


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """Where a worker runs.

    Attributes:
        name: host and process.
        node: of Ray; empty without.
        device: where its model's inputs go.
    """

    name: str
    node: str
    device: str


class WorkerFault(Exception):
    """The worker, not the candidate, is at fault: it is retired, and the candidate evaluated again elsewhere."""
