"""What a search needs to know of a model without its weights, and counts that follow from it; torch is not needed."""

from __future__ import annotations

from dataclasses import dataclass, field

from moevolve.kernels.routing_rule import RoutingRule

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


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
        dtype: of its parameters as loaded, `float32`, `bfloat16` or `float16`.
        notes: particularities, for people.
        dense: its dense feed-forward networks; None for a family where they aren't known.
        linears: its linear layers within decoder layers, in order of depth.
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
    dtype: str
    notes: tuple[str, ...] = field(default=())
    dense: DenseFacts | None = None
    linears: tuple[LinearFacts, ...] = field(default=(), repr=False)
    routing: RoutingRule | None = None

    @property
    def dtype_bytes(self) -> int:
        """Bytes per parameter as loaded."""
        return DTYPE_BYTES[self.dtype]

    @property
    def rule(self) -> RoutingRule:
        """How its routers choose and weigh experts."""
        return self.routing or RoutingRule(self.renormalise)


def parameters_after(facts: ModelFacts, retained: int, native: bool = False) -> int:
    """Parameters of the model with n' experts per MoE layer.

    Args:
        facts: the unedited model.
        retained: experts n' per MoE layer.
        native: count the form that keeps the whole router and an [n', n] mapping beside it (continuous mappings of the
            softmax), rather than a router of n' rows.
    """
    dropped = facts.experts - retained
    per_layer = -dropped * facts.expert_parameters
    per_layer += retained * facts.experts if native else -dropped * facts.router_parameters_per_expert
    return facts.parameters + len(facts.moe_layers) * per_layer


def active_parameters(facts: ModelFacts, retained: int, active: int, native: bool = False) -> int:
    """Parameters a token passes through with n' experts retained and k active: all but the experts not chosen."""
    idle = (retained - active) * facts.expert_parameters
    return parameters_after(facts, retained, native) - len(facts.moe_layers) * idle
