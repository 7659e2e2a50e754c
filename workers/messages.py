"""Typed messages between the driver and the workers. They flow one way each: requests down, replies up."""

from __future__ import annotations

from dataclasses import dataclass, field

from moevolve.evaluators.early_stopping import Floor
from moevolve.evaluators.types import PartialResult, Split, SplitResult
from moevolve.kernels.routing_rule import RoutingRule
from moevolve.workers.edits.base import Edit


@dataclass(frozen=True, slots=True)
class EvaluationRequest:
    """Score one edit on some prepared splits.

    Attributes:
        ticket: the driver's key of this request; replies carry it back, so a repeated reply is harmless.
        edit: what to do to the resident model.
        splits: fingerprints of the prepared splits, in order.
        floor: what the candidate has to reach to be of use; None evaluates it to the end.
    """

    ticket: str
    edit: Edit
    splits: tuple[str, ...]
    floor: Floor | None = None


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
class PartialTaskResult:
    """The split that a candidate was stopped on, half-way."""

    task_fingerprint: str
    result: PartialResult
    seconds: float


@dataclass(frozen=True, slots=True)
class EvaluationReply:
    """What a worker found.

    Attributes:
        results: one per requested split; empty when the candidate failed; those before it was stopped if it was.
        failure: the reason when the candidate itself is at fault, else None.
        worker: who did it (for the record only).
        stopped: whether the candidate was stopped because its floor was out of reach.
        partial: the split it was stopped on; None if that was between two.
    """

    ticket: str
    results: tuple[TaskResult, ...]
    failure: str | None
    seconds: float
    worker: str
    stopped: bool = False
    partial: PartialTaskResult | None = None


@dataclass(frozen=True, slots=True)
class PopulationChoice:
    """How many candidates share a pass, where a worker chose that (`moevolve.workers.population_choice`).

    Attributes:
        size: so many.
        hardware: the device it was measured on; empty on a CPU, where nothing is measured.
        seconds: size, and the time of a pass per candidate, in order of size; empty if nothing was measured.
        ended: why no larger size was measured; empty if all were.
    """

    size: int = 1
    hardware: str = ""
    seconds: tuple[tuple[int, float], ...] = ()
    ended: str = ""


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
