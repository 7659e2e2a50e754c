"""Typed messages between the driver and the workers. They flow one way each: requests down, replies up."""

from __future__ import annotations

from dataclasses import dataclass, field

from moevolve.evaluators.types import Split, SplitResult
from moevolve.workers.edits.base import Edit


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
    """One split's outcome, with the identity of what was scored."""

    task: str
    split: Split
    task_fingerprint: str
    result: SplitResult
    seconds: float


@dataclass(frozen=True, slots=True)
class EvaluationReply:
    """What a worker found.

    Attributes:
        results: one per requested split; empty when the candidate failed.
        failure: the reason when the candidate itself is at fault, else None.
        worker: who did it (for the record only).
    """

    ticket: str
    results: tuple[TaskResult, ...]
    failure: str | None
    seconds: float
    worker: str


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What a search needs to know of a model without its weights.

    Attributes:
        family: `transformers` model type (`mixtral`, `qwen2_moe` ...).
        fingerprint: SHA-256 (hex) identifying the weights.
        moe_layers: indices of the decoder layers that hold a MoE block, in order.
        experts: experts n per MoE layer.
        active: experts per token k.
        renormalise: whether the top-k routing weights are rescaled to sum 1.
        parameters: all parameters of the model.
        expert_parameters: parameters of one expert of one layer.
        router_parameters_per_expert: router parameters per expert of one layer.
        dtype_bytes: bytes per parameter as loaded.
    """

    family: str
    fingerprint: str
    moe_layers: tuple[int, ...]
    experts: int
    active: int
    renormalise: bool
    parameters: int
    expert_parameters: int
    router_parameters_per_expert: int
    dtype_bytes: int
    notes: tuple[str, ...] = field(default=())
