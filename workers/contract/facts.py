"""Facts that a search needs about a model, without its weights, and parameter counts derived from them; no torch."""

from __future__ import annotations

from dataclasses import dataclass, field

from moevolve.kernels.routing_rule import RoutingRule

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class DenseFacts:
    """The dense feed-forward networks and the attention of a model.

    Attributes:
        hidden: Size d of the residual stream.
        width: Number of neurons d_h per feed-forward network.
        gated: True for `down(act(gate(x)) * up(x))`, False for `down(act(up(x)))`.
        bias: True if the linear layers of the feed-forward networks have biases.
        heads, key_value_heads: Number of query heads and of key/value heads per layer.
        rotary_dim: Leading dimensions of a head that get rotary position embedding; 0 without it.
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

    @property
    def matrices(self) -> int:
        return 3 if self.gated else 2

    @property
    def neuron_parameters(self) -> int:
        """Parameters of a neuron of a network, which has no part in the output bias."""
        return self.matrices * self.hidden + (self.matrices - 1) * self.bias


@dataclass(frozen=True, slots=True)
class LinearFacts:
    """Name (such as `layers.0.mlp.up_proj`) and sizes of a linear layer within a decoder layer."""

    name: str
    outputs: int
    inputs: int
    bias: bool


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Facts about a model that don't need its weights.

    Attributes:
        family: `transformers` model type (`mixtral`, `qwen2_moe` ...).
        fingerprint: SHA-256 (hex) that identifies the checkpoint.
        moe_layers: Indices of the decoder layers with a MoE block, ascending; empty for a dense model.
        experts, active: Experts n per MoE layer and k per token; 0 for a dense model.
        renormalise: True if the top-k routing weights are rescaled to sum to 1.
        expert_parameters, expert_neurons: Parameters and neurons of one expert; 0 for a dense model.
        neuron_parameters: Parameters of one of these neurons.
        width_linked: True if other parts' width follows from the experts', so that narrower ones need code.
        shared_neurons: Neurons of the shared expert in a layer's MoE block; 0 without one.
        dtype: Parameter dtype after loading: `float32`, `bfloat16` or `float16`.
        notes: Particularities of the model, as text for users.
        dense: None for a mixture of experts.
        linears: Linear layers within the decoder layers, in order of depth.
        routing: Routing rule; None for softmax and top-k.
        correction_parameters: Parameters of a router's correction bias per expert: 0 where it is a buffer, as in most
            families and all native checkpoints.
        unrepairable: Why candidates can't be repaired, as a sentence's end; None if they can.
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
    expert_neurons: int = 0
    neuron_parameters: int = 0
    width_linked: bool = False
    shared_neurons: int = 0
    notes: tuple[str, ...] = field(default=())
    dense: DenseFacts | None = None
    linears: tuple[LinearFacts, ...] = field(default=(), repr=False)
    routing: RoutingRule | None = None
    correction_parameters: int = 0
    unrepairable: str | None = None

    @property
    def dtype_bytes(self) -> int:
        return DTYPE_BYTES[self.dtype]

    @property
    def active_parameters(self) -> int:
        """Number of parameters that a token uses."""
        return active_parameters(self, self.experts, self.active)

    @property
    def rule(self) -> RoutingRule:
        """Rule by which the routers choose and weight experts."""
        return self.routing or RoutingRule(self.renormalise)


def parameters_after(facts: ModelFacts, retained: int, native: bool = False) -> int:
    """Return the number of parameters of the model with n' retained experts per MoE layer.

    A `native` form keeps the router's n rows (for continuous mappings of the softmax) instead of n'. Its mapping and
    correction biases are buffers, which aren't trained and don't count.
    """
    dropped = facts.experts - retained
    router = facts.experts * facts.correction_parameters if native else dropped * facts.router_parameters_per_expert
    return facts.parameters - len(facts.moe_layers) * (dropped * facts.expert_parameters + router)


def active_parameters(facts: ModelFacts, retained: int, active: int, native: bool = False) -> int:
    """Return the number of parameters that a token uses with n' experts per layer and k of them active."""
    idle = (retained - active) * facts.expert_parameters
    return parameters_after(facts, retained, native) - len(facts.moe_layers) * idle


@dataclass(frozen=True, slots=True)
class FileSizes:
    """Size of the weight files of a pruned checkpoint.

    Which experts are kept makes a difference of a few bytes in the headers of files, which count at their largest.

    Attributes:
        fixed: Bytes of everything but the experts.
        expert: Bytes that one expert of every MoE layer takes, with its router rows.
        neurons: Bytes of its neurons alone, as plain numbers of the model's dtype.
    """

    fixed: int
    expert: int
    neurons: int

    def total(self, experts: int) -> int:
        """Return the bytes of the weight files with this number of kept experts per MoE layer."""
        return self.fixed + experts * self.expert
