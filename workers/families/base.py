"""The description of a model family, that is, of one `transformers` model type. Needs neither torch nor transformers.

Other code works with these descriptions and never names a family. Every family's decoder must have its layers in a
plain list `layers`, and each layer its feed-forward block in one module (but see `DenseFamily.inline`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from moevolve.kernels.routing_rule import RoutingGroups, RoutingRule

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import PretrainedConfig

# Derives the routing rule from a router and its model's config.
RuleFactory = Callable[["nn.Module", "PretrainedConfig"], RoutingRule]

# Name of the float32 buffer [n] that some routers add to their scores for choosing experts, not for weighting them.
CORRECTION_BIAS = "e_score_correction_bias"

# Why candidates of some families can't be repaired.
OUTPUT_NORM = "its layers normalise what their experts give before adding it, and a repair is linear in what they add"

# Why candidates of other families can't.
STREAMS = "its residual stream consists of several streams that every layer mixes, and a repair fits one"

# Experts get widths that are multiples of this: grouped matrix products need rows of whole 16 bytes.
EXPERT_ALIGNMENT = 8

# How `transformers` multiplies tokens with their experts (`experts_implementation`); on a CPU our products do so.
EXPERTS_BACKEND = "grouped_mm"

# Config fields with the number of layers for multi-token prediction, as DeepSeek and GLM, MiniMax, Qwen and MiMo name
# them. `transformers` never loads these layers.
MTP_FIELDS = ("num_nextn_predict_layers", "num_mtp_modules", "mtp_num_hidden_layers", "mtp_num_layers")


def softmax_rule(router: nn.Module, config: PretrainedConfig) -> RoutingRule:
    """Routing rule with a softmax over all experts, then the top-k, rescaled unless the config says otherwise."""
    return RoutingRule(renormalise=bool(getattr(router, "norm_topk_prob", True)))


def routing_groups(config: PretrainedConfig, best: int) -> RoutingGroups:
    """Return the groups of a config, which are ranked by their `best` experts."""
    count, chosen = int(config.n_group or 1), int(config.topk_group or 1)
    # Choosing from all groups is the same as having one group.
    return RoutingGroups(count, chosen, best) if chosen < count else RoutingGroups(best=best)


def routing(
    renormalise: bool | None = None, scale: str | None = None, best: int | None = None, **rule: Any
) -> RuleFactory:
    """Return a factory of rules that need no more than a few fields of a config.

    Args:
        renormalise: Whether the weights of the chosen experts are rescaled; None for `norm_topk_prob` in the config.
        scale: Config field with the factor on the weights; None for 1.
        best: See `routing_groups`; None for families without groups.
        rule: Further fields of the rule.
    """

    def made(router: nn.Module, config: PretrainedConfig) -> RoutingRule:
        return RoutingRule(
            renormalise=bool(config.norm_topk_prob) if renormalise is None else renormalise,
            scale=1.0 if scale is None else float(getattr(config, scale)),
            groups=RoutingGroups() if best is None else routing_groups(config, best),
            **rule,
        )

    return made


@dataclass(frozen=True, slots=True)
class Family:
    """What families of mixtures of experts and of dense models have in common.

    Attributes:
        title: Name of the family for users.
        sdpa: True if `transformers` has an sdpa implementation of its attention; `eager` is used otherwise.
        packs: True if its attention keeps packed sequences of one row apart by their position ids.
        pads_left: True if tokens may follow padding, which attention to blocks of keys by their place in a row, not by
            their position, doesn't allow.
        output_scale: Derives the factor on a network's output, or on the routed experts' sum, in the residual stream;
            None for 1.
    """

    model_type: str
    title: str
    sdpa: bool = field(default=True, kw_only=True)
    packs: bool = field(default=True, kw_only=True)
    pads_left: bool = field(default=True, kw_only=True)
    output_scale: Callable[[PretrainedConfig], float] | None = field(default=None, kw_only=True)


@dataclass(frozen=True, slots=True)
class ExpertFamily(Family):
    """How one model type stores its experts and routes tokens. Its MoE blocks have the modules `router` and `experts`.

    Attributes:
        casts_weights: True if routing weights are cast to the hidden states' dtype before they multiply the experts'
            outputs; False if they stay float32.
        block: Name of the feed-forward block in a decoder layer; empty if the layer itself has the router and experts.
        experts_field: Config field with the number of experts, as published checkpoints name it and servers read it.
        router: Name of the router in a MoE block.
        weight: Name of the weight [n, hidden] in the router.
        correction: Name of the correction bias in the router, or with `correction_in_block` in the block.
        tensors: Names of the fused expert parameters; shapes [n, 2I, H] and [n, H, I] in families without biases.
        float32_router: True if router logits are computed in float32 whatever the router's dtype.
        correction_in_block: True if the MoE block has the correction bias, and passes it to the router.
        shared_by_experts: Names of the modules among the experts that all of them use.
        stored: Ends of the names of fused experts in checkpoints, where these names don't contain `.experts.`.
        stored_router, stored_weight: Names of `router` and `weight` in checkpoints, if they are others.
        experts_input: Names of the modules in a MoE block that make the experts' inputs of the router's, one after the
            other; none if both get the same. A block without such a module leaves it out.
        takes_sequences: True if the router takes hidden states [rows, columns, hidden] only.
        unrepairable: Tells why candidates can't be repaired, as a sentence's end, or None if they can.
        prepare: Computes what a router multiplies with its weight from it and its inputs [tokens, hidden]; None if
            that is its inputs.
        logits_factor: Name of the router's factor on its logits; None without one.
        factors: Name of the router's factors [n] on the experts' routing weights; None if there are none.
        other_tensors: Names of the router's other tensors, which don't depend on the number of experts.
        table: Name of the router's table [vocabulary, k] of the experts of every token id; routers that lack it choose
            by their scores. MoE blocks pass token ids to routers with a table.
        gives_probabilities: True if the router returns the softmax of its logits instead of them.
        transposed: True if fused experts are stored transposed, and their class in `transformers` doesn't say so.
        adapted: True if `moevolve.workers.families.adapted` gives its MoE blocks the interface of other families'.
        resize_extras: Changes further config fields, by the routing rule and the number k of active experts.
    """

    casts_weights: bool
    rule: RuleFactory = softmax_rule
    block: str = "mlp"
    experts_field: str = "num_experts"
    width_field: str = "moe_intermediate_size"
    active_field: str = "num_experts_per_tok"
    router: str = "gate"
    weight: str = "weight"
    correction: str = CORRECTION_BIAS
    tensors: tuple[str, ...] = ("gate_up_proj", "down_proj")
    float32_router: bool = False
    correction_in_block: bool = False
    shared_by_experts: tuple[str, ...] = ()
    stored: tuple[str, ...] = ()
    stored_router: str | None = None
    stored_weight: str | None = None
    experts_input: tuple[str, ...] = ()
    takes_sequences: bool = False
    unrepairable: Callable[[PretrainedConfig], str | None] | None = None
    prepare: Callable[[Any, Tensor], Tensor] | None = None
    logits_factor: str | None = None
    factors: str | None = None
    other_tensors: tuple[str, ...] = ()
    table: str | None = None
    gives_probabilities: bool = False
    transposed: bool = False
    adapted: bool = False
    resize_extras: Callable[[PretrainedConfig, RoutingRule, int], None] | None = None

    @property
    def prefix(self) -> str:
        """Beginning of the names of the block's tensors within a decoder layer."""
        return f"{self.block}." if self.block else ""

    def stores_experts(self, name: str) -> bool:
        """Return whether a tensor of a checkpoint belongs to routed experts, by its name."""
        # Laguna's checkpoints have the correction bias of the router beside the experts.
        module = name.rpartition(".experts.")[2].partition(".")[0]
        others = name.endswith(CORRECTION_BIAS) or module in self.shared_by_experts
        return name.endswith(self.stored) or (".experts." in name and not others)

    def resize(self, config: PretrainedConfig, rule: RoutingRule, experts: int, active: int) -> None:
        """Change the numbers of experts n' and active experts k in a config, in place; it then has no layers for MTP.

        The rule is that of the config's model.
        """
        setattr(config, self.experts_field, experts)
        setattr(config, self.active_field, active)
        for name in MTP_FIELDS:
            if getattr(config, name, 0):
                setattr(config, name, 0)
        if self.resize_extras is not None:
            self.resize_extras(config, rule, active)


@dataclass(frozen=True, slots=True)
class DenseFamily(Family):
    """How one model type with dense feed-forward networks names their parts.

    Attributes:
        up, gate, down: Names of the linear layers; `gate` is None for networks without a gate, `down(act(up(x)))`.
        fused: Name of the linear layer in whose place the model has `gate` and `up`, whose rows are one's and then the
            other's; None if it has these.
        output_norm: Name of the decoder layer's norm between the network and the residual stream; None without one.
        inline: True if the decoder layer itself holds and runs these parts, instead of a module `mlp`.
        masks_heads: True if dimensions of attention heads can be masked: rotary embedding pairs dimensions i and
            i + head_dim / 2 of a whole head, and nothing else lies between the query and key projections and the
            attention.
        width_field: Config field with the number of neurons of every network.
        becomes_mixtral: True if the model equals a Mixtral once its networks are divided into experts with one active,
            unless its config gives its linear layers biases.
    """

    up: str
    gate: str | None
    down: str
    activation: str
    fused: str | None = None
    output_norm: str | None = None
    inline: bool = False
    masks_heads: bool = False
    width_field: str = "intermediate_size"
    becomes_mixtral: bool = False
