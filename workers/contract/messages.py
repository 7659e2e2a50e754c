"""Messages between the driver and its workers: requests, replies and faults."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from moevolve.evaluators.errors import FailureKind
from moevolve.evaluators.types import SplitRef, SplitResult
from moevolve.workers.contract.edits import Edit

# Most candidates that share the reading of layers: their states are in memory at once.
ROUND = 4


@dataclass(frozen=True, slots=True)
class EvaluationRequest:
    """Request to score an edit on prepared splits, in order.

    Attributes:
        experts, active, parameters, active_parameters: Sizes of the edited model, for the record; None for the full
            model.
        ticket: Identifier of the request. The reply carries it, so that a duplicate reply can be recognised.
    """

    edit: Edit
    splits: tuple[SplitRef, ...]
    experts: int | None = None
    active: int | None = None
    parameters: int | None = None
    active_parameters: int | None = None
    ticket: str = ""

    @property
    def fingerprints(self) -> tuple[str, ...]:
        return tuple(split.fingerprint for split in self.splits)

    @property
    def key(self) -> tuple[str, tuple[str, ...]]:
        """Content of the request: requests with equal keys have equal results."""
        return self.edit.phenotype_hash, self.fingerprints


@dataclass(frozen=True, slots=True)
class EvaluationReply:
    """Results of an evaluation, or the reason why it failed.

    Attributes:
        ticket: Identifier of the request.
        results: Results by fingerprint of the split, in order. A failed evaluation has those of the splits before the
            one that failed.
        failure: Reason of the failure; None on success.
        seconds: Total time, including applying the edit.
        kind: Cause of the failure.
        failed_on: Fingerprints of the splits that failed through the candidate's fault. Splits neither here nor in
            `results` were not tried.
        attempts: Number of tries, counted by the pool.
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
    """Location of a worker.

    Attributes:
        name: Host name and process id, `HOST/PID`.
        node: Id of the Ray node; empty without Ray.
        by_layer: True if it runs models one layer at a time, so that several candidates should share a layer's reading.
    """

    name: str
    node: str
    device: str
    by_layer: bool = False


class WorkerFault(Exception):
    """A failure of the worker, not of the candidate: the worker is retired and the candidate evaluated elsewhere."""
