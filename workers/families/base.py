"""The contract of a model family: what one `transformers` model type says of itself.

Nothing here needs torch or transformers. A family is data; whoever works on models of experts or of dense networks asks
it, and names none. Of every family is asked that its decoder's `layers` are a plain list, and that a layer's
position-wise block is called `mlp` (but see `DenseFamily.inline`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from moevolve.kernels.routing_rule import RoutingRule

if TYPE_CHECKING:
    from torch import nn
    from transformers import PretrainedConfig

MakesRule = Callable[["nn.Module", "PretrainedConfig"], RoutingRule]
"""From a router and its model's config."""

Resizes = Callable[["PretrainedConfig", RoutingRule, int], None]
"""Changes what else of a config depends on the number of experts: the config, its model's rule, active experts k."""

CORRECTION_BIAS = "e_score_correction_bias"
"""Name of the buffer [n], float32, that some routers add to their scores for choosing only."""


def softmax_rule(router: nn.Module, config: PretrainedConfig) -> RoutingRule:
    """Softmax over all experts, then the top-k, rescaled unless the config says otherwise."""
    return RoutingRule(renormalise=bool(getattr(router, "norm_topk_prob", True)))


@dataclass(frozen=True, slots=True)
class Family:
    """What models of experts and dense ones have in common.

    Attributes:
        model_type: `model_type` of its config.
        title: what people call it.
        sdpa: whether `transformers` has its attention as sdpa; `eager` is taken in its place otherwise.
        packs: whether its model keeps sequences of one row apart by their position ids, which begin anew at each.
    """

    model_type: str
    title: str
    sdpa: bool = field(default=True, kw_only=True)
    packs: bool = field(default=True, kw_only=True)


@dataclass(frozen=True, slots=True)
class ExpertFamily(Family):
    """How one model type holds its experts and routes. Its MoE blocks have the modules `router` (below) and `experts`.

    Attributes:
        casts_weights: whether routing weights are cast to the router's dtype before the experts see them (Mixtral's
            stay float32).
        rule: makes the routing rule of one router.
        experts_field: where its config counts the experts.
        width_field: where it counts an expert's neurons.
        router: name of the router in a MoE block.
        tensors: names of the fused expert parameters; of families without biases [n, 2I, H] and [n, H, I].
        float32_router: whether logits are computed in float32 whatever the router's dtype.
        also_resize: for a config that says more of its experts than `experts_field` and `num_experts_per_tok`.
    """

    casts_weights: bool
    rule: MakesRule = softmax_rule
    experts_field: str = "num_experts"
    width_field: str = "moe_intermediate_size"
    router: str = "gate"
    tensors: tuple[str, ...] = ("gate_up_proj", "down_proj")
    float32_router: bool = False
    also_resize: Resizes | None = None

    def resize(self, config: PretrainedConfig, rule: RoutingRule, experts: int, active: int) -> None:
        """Let a config of this family have other numbers of experts.

        Args:
            config: changed in place.
            rule: of the model whose config it is.
            experts: n' per MoE layer.
            active: k per token.
        """
        setattr(config, self.experts_field, experts)
        config.num_experts_per_tok = active
        if self.also_resize is not None:
            self.also_resize(config, rule, active)


@dataclass(frozen=True, slots=True)
class DenseFamily(Family):
    """How one model type of dense feed-forward networks names their parts.

    Attributes:
        up, gate, down: the linear layers; `gate` is None for plain networks, `down(act(up(x)))`.
        activation: name of the activation module.
        inline: the decoder layer itself holds the parts and runs them, instead of a module `mlp`.
        masks_heads: whether dimensions of its heads can be masked: rotary embedding turns dimensions i and
            i + head_dim / 2 of a whole head, and nothing but it stands between the query and key projections and the
            attention.
        becomes_mixtral: whether the model is an ordinary Mixtral once its networks are experts of which one is active,
            unless its config gives its layers biases.
    """

    up: str
    gate: str | None
    down: str
    activation: str
    inline: bool = False
    masks_heads: bool = False
    becomes_mixtral: bool = False
