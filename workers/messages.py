"""Typed messages between the driver and the workers. They flow one way each: requests down, replies up."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from moevolve.evaluators.types import Split, SplitResult
from moevolve.kernels.routing_rule import RoutingRule
from moevolve.workers.edits.base import Edit

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


@dataclass(frozen=True, slots=True)
class DenseFacts:
    """The dense feed-forward networks and the attention of a model.

    Attributes:
        layers: decoder layers.
        hidden: size d of the residual stream.
        width: neurons d_h per network.
        gated: `down(act(gate(x)) * up(x))`, rather than `down(act(up(x)))`.
        bias: whether the networks' linear layers have biases.
        heads, key_value_heads: per attention.
        head_dim: dimensions of a head.
        rotary_dim: leading dimensions of a head that rotary position embedding turns; 0 without it.
    """

    layers: int
    hidden: int
    width: int
    gated: bool
    bias: bool
    heads: int
    key_value_heads: int
    head_dim: int
    rotary_dim: int


@dataclass(frozen=True, slots=True)
class LinearFacts:
    """One linear layer within a decoder layer: its name (`layers.0.mlp.up_proj`) and sizes."""

    name: str
    outputs: int
    inputs: int
    bias: bool


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What a search needs to know of a model without its weights.

    Attributes:
        family: `transformers` model type (`mixtral`, `qwen2_moe` ...).
        fingerprint: SHA-256 (hex) identifying the checkpoint.
        moe_layers: indices of the decoder layers that hold a MoE block, in order; empty for a dense model.
        experts: experts n per MoE layer; 0 without any.
        active: experts per token k; 0 without any.
        renormalise: whether the top-k routing weights are rescaled to sum 1.
        parameters: all parameters of the model.
        expert_parameters: parameters of one expert of one layer.
        router_parameters_per_expert: router parameters per expert of one layer.
        dtype_bytes: bytes per parameter as loaded.
        notes: particularities, for people.
        dense: its dense feed-forward networks; None for a family where they aren't known.
        linears: its linear layers within decoder layers, in order of depth.
        embedding_parameters: of `parameters`, those that are only looked up.
        routing: how its routers choose and weigh; None is short for softmax and top-k.
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
    dense: DenseFacts | None = None
    linears: tuple[LinearFacts, ...] = field(default=(), repr=False)
    embedding_parameters: int = 0
    routing: RoutingRule | None = None

    @property
    def rule(self) -> RoutingRule:
        """How its routers choose and weigh experts."""
        return self.routing or RoutingRule(self.renormalise)
